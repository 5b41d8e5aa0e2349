"""Write the settings reference in docs/experiments.md from the models that check them.

python tools/write_settings.py
"""

from pathlib import Path
from typing import Any, get_args

from fedgma.experiments.grid import every_name
from fedgma.experiments.settings import Settings
from fedgma.experiments.settings.section import LARGE, MOST

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "experiments.md"
BEGIN, END = "<!-- settings: written by tools/write_settings.py -->", "<!-- end of settings -->"


def reference() -> str:
    """The table of all settings."""
    rows = ["| setting | default | values | what it is |", "| --- | --- | --- | --- |"]
    for dotted in every_name():
        section, _, name = dotted.rpartition(".")
        owner: Any = Settings.model_fields[section].annotation if section else Settings
        field = owner.model_fields[name]
        default = "open" if field.default is None else f"`{field.default}`"
        about = (field.description or "").replace("|", "\\|")
        rows.append(f"| `{dotted}` | {default} | {_values(field)} | {about} |")
    return "\n".join(rows)


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
    found = list(field.metadata)
    for part in get_args(field.annotation):
        for extra in getattr(part, "__metadata__", ()):
            found += list(getattr(extra, "metadata", [extra]))
    words = []
    for bound in found:
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
