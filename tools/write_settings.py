"""Write the settings reference in docs/settings.md from the models that check them.

python tools/write_settings.py
"""

from pathlib import Path
from typing import Any, get_args

from fedgma.experiments.grid import every_name
from fedgma.experiments.settings import Settings
from fedgma.experiments.settings.section import LARGE, MOST

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "settings.md"
BEGIN, END = "<!-- settings: written by tools/write_settings.py -->", "<!-- end of settings -->"


GROUPS = {  # the first setting of each group, and its heading
    "dataset": "Data, task and model",
    "algorithm": "Algorithm and rule",
    "rounds": "Rounds and local training",
    "mu": "Settings of single algorithms",
    "server_learning_rate": "Server",
    "seed": "Seed and evaluation",
    "partition": "Partition",
    "shift": "Shift",
    "attack": "Attack",
    "clock": "Clock",
    "round_schedule": "Schedules of the learning rate",
}
TWIN = "step_schedule"  # has the settings of `round_schedule`


def reference() -> str:
    """The tables of all settings, one for each group."""
    lines: list[str] = []
    begun: set[str] = set()
    for dotted in every_name():
        section, _, name = dotted.rpartition(".")
        first = section or name
        if section == TWIN:
            continue
        if first in GROUPS and first not in begun:
            begun.add(first)
            lines += ["", f"### {GROUPS[first]}", "", *_words_of(first)]
            lines += ["| setting | default | values | what it is |", "| --- | --- | --- | --- |"]
        owner: Any = Settings.model_fields[section].annotation if section else Settings
        lines.append(_row(dotted, owner.model_fields[name]))
    return "\n".join(lines).strip()


def _words_of(first: str) -> list[str]:
    twins = f"`{TWIN}` has the same settings as `round_schedule`: one is for the rounds of a run, one for local steps."
    return [twins, ""] if first == "round_schedule" else []


def _row(dotted: str, field: Any) -> str:
    default = "open" if field.default is None else f"`{field.default}`"
    about = (field.description or "").replace("|", "\\|")
    return f"| `{dotted}` | {default} | {_values(field)} | {about} |"


def _values(field: Any) -> str:
    """Choices, or a type with its bounds."""
    kind = field.annotation
    options = field.examples or [part for part in get_args(kind) if isinstance(part, str)]
    for part in get_args(kind):
        options += [choice for choice in get_args(part) if isinstance(choice, str)]
    if options:
        return ", ".join(f"`{option}`" for option in options)
    names = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    plain = next(
        (part for part in (kind, *get_args(kind), *(a for p in get_args(kind) for a in get_args(p))) if part in names),
        str,
    )
    return names[plain] + _bounds(field)


def _bounds(field: Any) -> str:
    bounds = list(field.metadata)
    for part in get_args(field.annotation):
        for extra in getattr(part, "__metadata__", ()):
            bounds += list(getattr(extra, "metadata", [extra]))
    words = []
    for bound in bounds:
        for sign, name in ((">", "gt"), (">=", "ge"), ("<", "lt"), ("<=", "le")):
            if getattr(bound, name, None) not in (None, MOST, LARGE):  # the page says once that numbers end there
                words.append(f"{sign} {getattr(bound, name)}")
    return f" {' and '.join(words)}" if words else ""


def page_with(reference: str, page: str) -> str:
    """The page with the reference in its place."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{reference}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page_with(reference(), PAGE.read_text()))
