"""From a settings file and `key=value` words to runs: a list of values makes a sweep.

An unknown name is refused with the nearest known one, a wrong value with its key, the expected and the given value.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fedgma.aggregation.rules import BASELINE
from fedgma.documents import PathLike, is_utf8, parse_toml, read_bytes
from fedgma.errors import ConfigError, DataError, did_you_mean, nearest
from fedgma.experiments.settings import SECTIONS, Settings, complete, record
from fedgma.experiments.settings.attack import AttackSettings
from fedgma.experiments.settings.clock import ClockSettings
from fedgma.experiments.settings.local_training import ScheduleSettings
from fedgma.experiments.settings.partition import PartitionSettings
from fedgma.experiments.settings.recorded import USED
from fedgma.experiments.settings.shift import ShiftSettings
from fedgma.records.format import fingerprint

# values of these two settings where a file gives none: with and without the mask, on enough seeds for a verdict
COMPARED: dict[str, Any] = {"aggregator": [BASELINE, "gma"], "seed": [0, 1, 2, 3, 4]}
AVERAGE = 0.9  # `server_average` of the third arm where nothing is given
LARGEST = 2**20  # bytes of a settings file
MOST = 100_000  # runs of a sweep
_NUMBER = re.compile(r"[+-]?(\d+\.\d*|\.\d+)([eE][+-]?\d+)?")  # also .1 and 1., which TOML does not read
_RANGE = re.compile(r"(?<![\w.])(\d{1,15})\.\.(\d{1,15})(?![\w.])")
OTHER_NAMES = {  # of settings, in other libraries
    "lr": "client_learning_rate",
    "learning_rate": "client_learning_rate",
    "num_rounds": "rounds",
    "num_clients": "partition.clients",
    "fraction": "clients_per_round",
    "rule": "aggregator",
    "strategy": "aggregator",
    "data": "dataset",
}

_MODELS: dict[str, type[BaseModel]] = {
    "": Settings,
    "partition": PartitionSettings,
    "shift": ShiftSettings,
    "attack": AttackSettings,
    "clock": ClockSettings,
    "round_schedule": ScheduleSettings,
    "step_schedule": ScheduleSettings,
}


class Grid(NamedTuple):
    """The runs of a settings file, and the keys that differ between them (seed last)."""

    runs: tuple[Settings, ...]
    axes: tuple[str, ...]
    folder: Path | None = None  # of the settings file: relative paths in it start there


def read_grid(file: PathLike | None = None, words: Sequence[str] = (), *, own: bool = False) -> Grid:
    """The runs of a settings file (or of the defaults), changed by `key=value` words.

    >>> grid = read_grid(None, ["rounds=20", "tau=0.2,0.4", "seed=[0, 1]"])
    >>> len(grid.runs), grid.axes                         # the plain mean has no tau: one run for each seed
    (6, ('aggregator', 'tau', 'seed'))
    """
    given = {} if file is None else read_file(Path(file))
    for word in words:
        given = _set(given, *_parse_word(word))
    return expand(given, own=own)._replace(folder=None if file is None else Path(file).resolve().parent)


def embedded_comparison() -> Grid:
    """The comparison where nothing is given: on embedded images the mean, GMA, and an average of the mean's models."""
    both, average = expand({}), expand({"aggregator": BASELINE, "server_average": AVERAGE})
    return Grid((*both.runs, *average.runs), ("aggregator", "server_average", "seed"))


def read_file(file: Path) -> dict[str, Any]:
    """The content of a settings file, not checked yet."""
    try:
        content = read_bytes(file, LARGEST, "the settings file")
        text = content.decode("utf-8-sig")  # Windows editors may begin a file with a mark
    except DataError as error:
        raise ConfigError(str(error)) from None
    except UnicodeDecodeError:
        raise ConfigError(f"the settings file {str(file)!r} is not UTF-8 text; save it as UTF-8") from None
    try:
        return parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{file.name} is not TOML: {_point(text, str(error))}") from None


def from_python(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a program as a settings file would have them: names with a dot are nested, values are plain.

    >>> from_python({"partition.clients": 20, "seed": range(2), "dataset": Path("mine.npz")})
    {'partition': {'clients': 20}, 'seed': [0, 1], 'dataset': 'mine.npz'}
    """
    settings: dict[str, Any] = {}
    for name, value in given.items():
        settings = _set(settings, str(name), _plain(value))
    return settings


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return from_python(value)
    if isinstance(value, list | tuple | range):
        return [_plain(part) for part in value]
    if hasattr(value, "tolist"):  # a number or an array of numpy or torch
        return value.tolist()
    return str(value) if isinstance(value, Path) else value


def expand(given: Mapping[str, Any], *, own: bool = False) -> Grid:
    """All runs of nested settings in which any value may be a list: the product of the lists, seeds innermost.

    `own` is that of `complete`.
    """
    check_names(given)
    wanted = {**COMPARED, **given}
    axes = _axes(wanted)
    total = 1
    for dotted, values in axes.items():
        _check_axis(dotted, values)
        total *= len(values)
    if total > MOST:
        raise ConfigError(f"the lists multiply to {total} runs, more than {MOST}; shorten one of: {', '.join(axes)}")
    runs: dict[str, Settings] = {}
    for chosen in itertools.product(*axes.values()):
        single: Mapping[str, Any] = wanted
        for dotted, value in zip(axes, chosen, strict=True):
            single = _set(single, dotted, value)
        settings = complete(check(single), own=own)
        runs.setdefault(fingerprint({**record(settings), "dataset": settings.dataset}), settings)
    _check_used(given, list(runs.values()))
    return Grid(tuple(runs.values()), tuple(dotted for dotted, values in axes.items() if len(values) > 1))


def check(given: Mapping[str, Any]) -> Settings:
    """The settings of one run, checked; an error names the wrong setting.

    >>> check({"tua": 0.4})
    Traceback (most recent call last):
    ...
    fedgma.errors.ConfigError: unknown setting 'tua'; did you mean 'tau'?
    """
    check_names(given)
    if odd := next((name for name, value in _texts(given) if not is_utf8(value)), None):
        raise ConfigError(f"{odd}: expected UTF-8 text, got bytes of another encoding; rename the file")
    try:
        return Settings.model_validate(dict(given))
    except ValidationError as error:
        raise ConfigError(_sentence(error.errors()[0])) from None


def _texts(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every text with the name of its setting."""
    for name, value in given.items():
        if isinstance(value, Mapping):
            yield from _texts(value)
        elif isinstance(value, str):
            yield name, value


def check_names(given: Mapping[str, Any], section: str = "") -> None:
    """Refuse an unknown name and suggest the nearest setting."""
    known = list(_MODELS[section].model_fields)
    for name, value in given.items():
        if name not in known:
            raise ConfigError(_unknown(name, section))
        if not section and name in SECTIONS:
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Mapping):
                    check_names(part, name)


def every_name() -> list[str]:
    """All settings by their dotted names, in order."""
    top = [name for name in Settings.model_fields if name not in SECTIONS]
    return [*top, *(f"{section}.{name}" for section in SECTIONS for name in _MODELS[section].model_fields)]


def _unknown(name: str, section: str) -> str:
    dotted = f"{section}.{name}" if section else name
    inside = [f"{section}.{known}" for known in _MODELS[section].model_fields] if section else []
    same = [known for known in every_name() if known.rsplit(".", 1)[-1] == name] or [OTHER_NAMES.get(name, "")]
    if not section and same[0]:
        return f"unknown setting {dotted!r}{did_you_mean(same[:1])}"
    near = nearest(dotted, inside or [*Settings.model_fields, *every_name()], cutoff=0.5)
    near = near or nearest(name, [known.rsplit(".", 1)[-1] for known in every_name()])
    return f"unknown setting {dotted!r}{did_you_mean(near) or '; `fedgma run --show` lists them all'}"


_PLAIN = {
    "int_type": "expected a whole number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "string_type": "expected a text",
}
_EXAMPLES = {"shift": "colour", "attack": "sign_flip", "clock": "synchronous"}
_EXAMPLES |= dict.fromkeys(("round_schedule", "step_schedule"), "cosine")


def _sentence(error: ErrorDetails) -> str:
    """A pydantic error in one sentence that names the key."""
    where = ".".join(str(part) for part in error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    if not where:
        return message  # our own checks name their key
    if error["type"] == "model_type":
        message = f'expected a name, or a table such as {{ name = "{_EXAMPLES.get(where, "iid")}" }}'
    message = _PLAIN.get(error["type"], message[:1].lower() + message[1:])
    value = repr(error["input"])
    return (
        f"{where}: {message}, got {value if len(value) < 80 else value[:77] + '...'}{_nearest(error)}{_as_range(error)}"
    )


def _as_range(error: ErrorDetails) -> str:
    """A hint for whole numbers that were written as 0-9 or 0:9, as elsewhere."""
    ends = re.fullmatch(r"(\d+)\s*[-:]\s*(\d+)", str(error["input"]))
    return f"; write {ends[1]}..{ends[2]} for all of these" if ends and error["type"] == "int_type" else ""


def _nearest(error: ErrorDetails) -> str:
    """A hint for a value that is close to an allowed one."""
    allowed = re.findall(r"'([^']*)'", str(error.get("ctx", {}).get("expected", "")))
    return did_you_mean(nearest(error["input"], allowed))


def _axes(given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Dotted name -> values of every list; `seed` comes last, so that the runs of an arm are adjacent."""
    axes: dict[str, list[Any]] = {}
    for name, value in given.items():
        if isinstance(value, list):
            axes[name] = value
        elif isinstance(value, Mapping):
            axes |= {f"{name}.{key}": values for key, values in _axes(value).items()}
    if "seed" in axes:
        axes["seed"] = axes.pop("seed")
    return axes


def _check_axis(dotted: str, values: list[Any]) -> None:
    if not values:
        raise ConfigError(f"{dotted}: expected at least one value, got an empty list")
    if any(isinstance(value, list) for value in values):
        raise ConfigError(f"{dotted}: expected a list of values, got a list inside a list")
    for position, value in enumerate(values):
        if value in values[:position] and not isinstance(value, bool):
            raise ConfigError(f"{dotted}: {value!r} is in the list twice; remove one")


def _check_used(given: Mapping[str, Any], runs: Sequence[Settings]) -> None:
    """Refuse a setting that no run uses, because it would be ignored without notice."""
    for dotted in _leaves(given):
        used = USED.get(dotted)
        if used is not None and not any(used(settings) for settings in runs):
            raise ConfigError(f"{dotted} is given but no run uses it; remove it, or see `fedgma run --show`")


def _leaves(given: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, value in given.items():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Mapping):
                yield from _leaves(part, f"{before}{name}.")
            else:
                yield f"{before}{name}"


def _set(given: Mapping[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    """Nested settings with one value changed; a section given as a string keeps it as its `name`."""
    name, _, rest = dotted.partition(".")
    if not rest:
        return {**given, name: value}
    section = given.get(name, {})
    listed = section if isinstance(section, list) else [section]
    parts = [{"name": part} if isinstance(part, str) else part for part in listed]
    if not all(isinstance(part, Mapping) for part in parts):
        raise ConfigError(f"{dotted}: {name!r} is not a section of settings, its value is {section!r}")
    new = [_set(part, rest, value) for part in parts]
    return {**given, name: new if isinstance(section, list) else new[0]}


def _parse_word(word: str) -> tuple[str, Any]:
    """`tau=0.4`, `partition.clients=50`, `aggregator=mean,gma`, `seed=[0, 1, 2]`, `seed=0..9`."""
    dotted, sign, text = word.partition("=")
    dotted = dotted.strip()
    if not sign or not text.strip():
        raise ConfigError(f"expected key=value, got {word!r}")
    section, _, name = dotted.rpartition(".")
    if section not in _MODELS or name not in _MODELS[section].model_fields:
        raise ConfigError(_unknown(name, section) if section in _MODELS else _unknown(dotted, ""))
    return dotted, _value(text.strip())


def _value(text: str) -> Any:
    value = _scalar(text)
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if value != text or (not _RANGE.search(bare) and "," not in bare and bare == text):
        return value
    return [one for part in bare.split(",") if part.strip() for one in _numbers(part.strip())]


def _numbers(text: str) -> Sequence[Any]:
    """All whole numbers of `0..9`, both ends included; of other texts the value alone."""
    if not (ends := _RANGE.fullmatch(text)):
        return [_scalar(text)]
    first, last = int(ends[1]), int(ends[2])
    if not first <= last < first + MOST:
        raise ConfigError(f"expected a range from a number up to a larger one, such as 0..9, got {text!r}")
    return range(first, last + 1)


def _scalar(text: str) -> Any:
    """A value in TOML, or a word without quotes."""
    try:
        parsed = parse_toml(f"v = {text}")
    except ValueError:
        return float(text) if _NUMBER.fullmatch(text) else text
    return parsed["v"] if len(parsed) == 1 else text  # a line break would begin another setting


def _point(text: str, message: str) -> str:
    """A parser's message with the text of the line that it names."""
    match = re.search(r"at line (\d+)", message)
    lines = text.splitlines()
    if match and 0 < int(match[1]) <= len(lines):
        return f"{message}: {lines[int(match[1]) - 1].strip()[:80]!r}"
    return message
