"""`fedgma run --show`: every setting of a grid as a settings file, with what it means."""

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

    from fedgma.grids import Grid


def show_settings(grid: "Grid") -> str:
    """All settings as a settings file of the same runs: values that differ as lists, those not in use as comments."""
    from fedgma.config import SECTIONS, Settings, record

    recorded = [record(settings) for settings in grid.runs]
    defaults = Settings()
    top = [name for name in Settings.model_fields if name not in SECTIONS]
    lines = [_row(name, recorded, defaults) for name in top]
    for section in SECTIONS:
        inner = [one[section] for one in recorded]
        if all(one["partition"]["seed"] == one["seed"] for one in recorded):
            inner = [{**one, "seed": None} for one in inner]  # it follows the run's
        default = getattr(defaults, section)
        lines += ["", f"[{section}]", *(_row(name, inner, default) for name in type(default).model_fields)]
    return "\n".join(lines)


def _row(name: str, recorded: list[dict[str, Any]], default: "BaseModel") -> str:
    values: list[Any] = []
    for one in recorded:
        if one[name] is not None and one[name] not in values:
            values.append(one[name])
    if values:
        text = f"{name} = {_toml(values[0] if len(values) == 1 else values)}"
    else:
        unset = getattr(default, name)
        text = f"# {name} = {'...' if unset is None else _toml(unset)}"
    return f"{text:<36} # {type(default).model_fields[name].description or ''}"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)  # numbers and strings of both languages look alike
