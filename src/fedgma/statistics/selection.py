"""Choose runs by words such as `gma`, `aggregator=gma,tau=0.4` or `dataset=mnist,fmnist`; and those that finished."""

from collections.abc import Sequence
from typing import Any

from fedgma.errors import ConfigError, DataError, did_you_mean, nearest
from fedgma.records.label import read_label
from fedgma.records.reader import Run
from fedgma.statistics.arms import grouped, trait, traits
from fedgma.statistics.labels import plain

WORDS = ("aggregator", "algorithm", "dataset", "model")  # settings in which a bare word such as `gma` is searched
NAME = "name"  # what a user calls runs; no setting, but runs are chosen by it too


def select(runs: Sequence[Run], wanted: str) -> tuple[list[Run], list[str]]:
    """The runs that an arm such as `gma` or `aggregator=gma,tau=0.4` selects, and the settings in it."""
    chosen, names = list(runs), []
    for part in wanted.split(","):
        name, mark, value = (text.strip() for text in part.partition("="))
        name, value = (_known(runs, name), value) if mark else (_word(runs, name), name)
        chosen = [run for run in chosen if _same(_seen(run, name), value)]
        names.append(name)
    if not chosen:
        raise ConfigError(f"no run matches {wanted!r}; the runs have {_choices(runs, names[0])}")
    return chosen, names


def select_arm(runs: Sequence[Run], wanted: str) -> tuple[list[Run], list[str]]:
    """As `select`; an arm may also be named as tables have it, such as `GMA, tau 0.4`, or by the name of its runs."""
    try:
        return select(runs, wanted)
    except ConfigError as error:
        arms = {row.name: row for row in grouped(runs)}
        if wanted in arms:
            row = arms[wanted]
            return list(row.runs), [name for name, value in row.label.items() if value is not None]
        if called := [run for run in runs if _seen(run, NAME) == wanted]:
            return called, [NAME]
        raise ConfigError(f"{error}, or an arm as tables name it: {', '.join(map(repr, list(arms)[:8]))}") from None


def where(runs: Sequence[Run], filters: str | Sequence[str]) -> list[Run]:
    """The runs that match every filter such as `dataset=t.npz` or `algorithm=fedavg,fedadam`.

    Any of several values matches; a bare word such as `gma` works as in an arm. `name=...` is the user's name of runs.
    """
    chosen = list(runs)
    for text in [filters] if isinstance(filters, str) else filters:
        for name, values in _conditions(runs, text):
            kept = [run for run in chosen if any(_same(_seen(run, name), value) for value in values)]
            if not kept:
                raise ConfigError(f"no run has {name}={','.join(values)}; the runs have {_choices(chosen, name)}")
            chosen = kept
    return chosen


def finished_of(runs: Sequence[Run], arm: str = "") -> list[Run]:
    """The finished runs, at least one; an error names the arm, if it is given."""
    finished = [run for run in runs if run.finished]
    if runs and not finished:
        furthest = max(runs, key=lambda run: len(run.rounds) / max(run.planned, 1))
        of_arm = f"{arm}: " if arm else ""
        raise DataError(
            f"{of_arm}none of the {len(runs)} runs has finished (the furthest is at round {len(furthest.rounds)} of "
            f"{furthest.planned}); run the same command again to continue them"
        )
    return finished


def _conditions(runs: Sequence[Run], text: str) -> list[tuple[str, list[str]]]:
    """Parse `dataset=a,b,tau=0.4` into names with their accepted values."""
    conditions: list[tuple[str, list[str]]] = []
    for part in text.split(","):
        name, mark, value = (piece.strip() for piece in part.partition("="))
        if mark:
            conditions.append((_known(runs, name), [value]))
        elif conditions:
            conditions[-1][1].append(name)
        else:
            conditions.append((_word(runs, name), [name]))
    return conditions


def _known(runs: Sequence[Run], name: str) -> str:
    """The full name of a setting: `clients` is `partition.clients` if no other setting ends so."""
    if name == NAME:
        return NAME
    names = list(dict.fromkeys(key for run in runs for key in (*run.settings, *traits(run))))
    fits = [key for key in names if key == name] or [key for key in names if key.endswith(f".{name}")]
    if len(fits) != 1:
        near = fits or nearest(name, names, most=3, cutoff=0.5) or names[:10]
        raise ConfigError(f"{name!r} does not name exactly one setting{did_you_mean(near)}")
    return fits[0]


def _word(runs: Sequence[Run], word: str) -> str:
    for name in WORDS:
        if any(_same(run.settings.get(name), word) for run in runs):
            return name
    known = "; ".join(f"{name}: {_choices(runs, name)}" for name in WORDS)
    raise ConfigError(f"no run has {word!r} ({known}); give a folder, one of these, or setting=value")


def _choices(runs: Sequence[Run], name: str) -> str:
    return ", ".join(sorted({plain(_seen(run, name)) for run in runs} - {""})) or "none"


def _seen(run: Run, name: str) -> Any:
    """A trait of a run, or the name that the user gave it."""
    return read_label(run.folder).name if name == NAME else trait(run, name)


def _same(value: Any, text: str) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value) == float(text)
        except ValueError:
            return False
    return text in (str(value), plain(value))
