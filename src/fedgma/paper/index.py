"""Find the runs that a plan asks for among those that were read, also runs from before a setting existed."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fedgma.experiments.settings import Settings
from fedgma.paper.entries import Entry
from fedgma.records.reader import flat

DEFAULTS = dict(flat(Settings().model_dump()))
Table = tuple[list[str], dict[str, list[Entry]]]  # names of settings, and entries by the values of these
KIND = ("dataset", "algorithm", "aggregator")  # a quick look before all settings are compared


class Index:
    """Entries by the settings that both record and plan have."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._known: dict[tuple[frozenset[str], frozenset[str], tuple[str, ...]], Table] = {}
        self._by_names: dict[frozenset[str], list[Entry]] = {}
        self._kinds: dict[frozenset[str], set[tuple[Any, ...]]] = {}  # what occurs there of `KIND`
        for entry in entries:
            names = frozenset(entry.settings)
            self._by_names.setdefault(names, []).append(entry)
            self._kinds.setdefault(names, set()).add(_kind(entry.settings))

    def find(self, wanted: dict[str, Any], without: tuple[str, ...]) -> list[Entry]:
        """The entries with the settings of `wanted`, whatever their values of those in `without`."""
        entries, kind, names_wanted, free = [], _kind(wanted), frozenset(wanted), {*without}
        for names, kinds in self._kinds.items():
            if kind not in kinds:
                continue
            newer = names_wanted - names - free  # these runs had the default, or did not use the setting
            if not all(_is_usual(name, wanted[name]) for name in newer):
                continue
            common = names & names_wanted
            compared, table = self._table(names, common, without)
            candidates = table.get(_key(wanted, compared), [])
            further = names - names_wanted - free  # the planned run has the default, which it does not record
            entries += [entry for entry in candidates if all(_is_usual(name, entry.settings[name]) for name in further)]
        return list({id(entry): entry for entry in entries}.values())

    def _table(self, names: frozenset[str], common: frozenset[str], without: tuple[str, ...]) -> Table:
        """The entries with settings of these names, by their values of the `common` ones."""
        if (names, common, without) not in self._known:
            compared = sorted(common.difference(without))
            table: dict[str, list[Entry]] = {}
            for entry in self._by_names[names]:
                table.setdefault(_key(entry.settings, compared), []).append(entry)
            self._known[names, common, without] = compared, table
        return self._known[names, common, without]


def _key(settings: Mapping[str, Any], names: Sequence[str]) -> str:
    """The values of these settings as text."""
    return json.dumps([settings[name] for name in names])


def _is_usual(name: str, value: Any) -> bool:
    return value in (None, DEFAULTS.get(name))


def _kind(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(settings.get(name) for name in KIND)
