"""`fedgma run --show`: every setting of a grid as a settings file, with its description."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

    from fedgma.experiments.grid import Grid


def show_settings(grid: "Grid") -> str:
    """A settings file of the same runs: values that differ are lists, settings that no run uses are comments."""
    from fedgma.experiments.settings import SECTIONS, Settings, record

    recorded = [record(settings) for settings in grid.runs]
    defaults = Settings()
    top = [name for name in Settings.model_fields if name not in SECTIONS]
    lines = [_row(name, recorded, defaults, grid.axes) for name in top]
    for section in SECTIONS:
        default = getattr(defaults, section)
        inner = [run.get(section, dict.fromkeys(type(default).model_fields)) for run in recorded]
        rows = [_row(name, inner, default, grid.axes, section) for name in type(default).model_fields]
        lines += ["", f"[{section}]", *rows]
    return "\n".join(lines)


def _row(
    name: str, recorded: list[dict[str, Any]], default: "BaseModel", axes: Sequence[str], section: str = ""
) -> str:
    """One line of the file; a setting whose values follow from another setting is a comment."""
    values: list[Any] = []
    for run in recorded:
        value = run.get(name, getattr(default, name))  # a record may leave a default out
        if value is not None and value not in values:
            values.append(value)
    if len(values) > 1 and (f"{section}.{name}" if section else name) not in axes:
        text = f"# {name} = {_toml(values)}"
    elif values:
        text = f"{name} = {_toml(values[0] if len(values) == 1 else values)}"
    else:
        unset = getattr(default, name)
        text = f"# {name} = {'...' if unset is None else _toml(unset)}"
    return f"{text:<36} # {type(default).model_fields[name].description or ''}"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)  # JSON and TOML write numbers and strings the same way
