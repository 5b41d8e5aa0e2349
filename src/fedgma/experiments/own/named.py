"""The code that settings name: of the library, of a user's file (`file.py:name`), or passed in Python (`own:name`)."""

from pathlib import Path, PurePath
from typing import Any

from torch import nn

from fedgma.aggregation.own import AnyRule, as_rule
from fedgma.aggregation.rule import Rule
from fedgma.data.files.locate import existing
from fedgma.data.partitions import Divider
from fedgma.errors import ConfigError
from fedgma.experiments.own.files import file_of, import_code, load_code
from fedgma.experiments.own.tasks import make_task, task_name
from fedgma.experiments.settings.clock import located_clock
from fedgma.experiments.settings.partition import OWN
from fedgma.experiments.settings.run import MODELS, Settings, is_path
from fedgma.experiments.settings.task import check_model
from fedgma.training.models import Model
from fedgma.training.task import Task


class NamedCode:
    """Finds models, tasks, rules and partitions by the names that settings have; each is loaded once."""

    def __init__(
        self, folder: Path | None, model: Model | None, task: object, aggregator: AnyRule | None, partition: Any
    ) -> None:
        if partition is not None and not callable(partition):
            raise ConfigError(
                f"partition must be a function of labels, clients and generator, got {partition!r:.60}; "
                "a partition of the library is named in the settings"
            )
        if model is not None and not isinstance(model, str) and not callable(model):
            raise ConfigError(f"model must be a name, a module or a function that makes one, got {model!r:.60}")
        self.folder = folder  # where relative paths in the settings start; then the current folder
        self.model = model
        self.task_given = task  # by name, or a user's class or object
        self.aggregator = aggregator
        self.partition: Divider | None = partition
        self._models: dict[str, Model] = {}
        self._tasks: dict[str, Task] = {}
        self._rules: dict[str, tuple[AnyRule, Rule]] = {}
        self._dividers: dict[str, Divider] = {}

    def named(self, settings: Settings) -> Settings:
        """The settings, with the names of what was passed in Python."""
        names: dict[str, Any] = {}
        if self.model is not None and not isinstance(self.model, str):
            kind = type(self.model) if isinstance(self.model, nn.Module) else self.model
            names["model"] = OWN + getattr(kind, "__name__", "factory")
        elif self.model is not None:
            names["model"] = self.model
        if (task := task_name(self.task_given)) is not None:
            names["task"] = task
        if self.partition is not None:
            name = OWN + getattr(self.partition, "__name__", "function")
            names["partition"] = settings.partition.model_copy(update={"name": name})
        return settings.model_copy(update=names)

    def located(self, settings: Settings) -> Settings:
        """The settings with absolute paths of the user's files, for a process that runs elsewhere."""
        update: dict[str, Any] = {}
        if is_path(settings.dataset) and (path := self.find(settings.dataset)) is not None:
            update["dataset"] = str(path.resolve())
        for setting in ("model", "task", "aggregator"):
            name = str(getattr(settings, setting))
            if (file := self._file(name, setting)) is not None:
                update[setting] = f"{file.resolve()}:{name.rpartition(':')[2]}"
        name = str(settings.partition.name)
        if (file := self._file(name, "partition")) is not None:
            place = f"{file.resolve()}:{name.rpartition(':')[2]}"
            update["partition"] = settings.partition.model_copy(update={"name": place})
        update["clock"] = located_clock(settings.clock, self.find)
        return settings.model_copy(update=update)

    def network(self, settings: Settings) -> Model:
        """The model of a run: a name, or what the user's file defines or the user passed."""
        name = str(settings.model)
        check_model(settings, MODELS)
        if name.startswith(OWN):
            if self.model is None:
                raise ConfigError(f"model {name!r} was passed in Python; pass it again as model=...")
            return self.model
        if (file := self._file(name, "model")) is not None and name not in self._models:
            short = name.rpartition(":")[2]
            self._models[name] = load_code(file, short, setting="model", arguments="shape, classes")
        return self._models.get(name, name)

    def task(self, name: str) -> Task:
        """The task of that name, of the library or of the user."""
        if name not in self._tasks:
            self._tasks[name] = make_task(name, self.task_given, self._file)
        return self._tasks[name]

    def divider(self, name: str) -> Divider | None:
        """The user's function of a partition of this name; None for a known partition."""
        if name.startswith(OWN):
            if self.partition is None:
                raise ConfigError(f"partition {name!r} was passed in Python; pass it again as partition=...")
            return self.partition
        if (file := self._file(name, "partition")) is not None and name not in self._dividers:
            arguments = "labels, clients, generator"
            self._dividers[name] = load_code(file, name.rpartition(":")[2], setting="partition", arguments=arguments)
        return self._dividers.get(name)

    def rule(self, name: str) -> tuple[AnyRule, Rule]:
        """The user's code, and the rule that it stands for; runs share one object, so that a fleet calls it once."""
        if name not in self._rules:
            code = self._rule_code(name)
            self._rules[name] = code, as_rule(code, None if name.startswith(OWN) else PurePath(name).name)
        return self._rules[name]

    def _rule_code(self, name: str) -> AnyRule:
        if name.startswith(OWN):
            if self.aggregator is None:
                raise ConfigError(f"aggregator {name!r} was passed in Python; pass it again as aggregator=...")
            return self.aggregator
        file = self._file(name, "aggregator")
        if file is None:
            return import_code(name, setting="aggregator")
        return load_code(file, name.rpartition(":")[2], setting="aggregator", arguments="mean, votes, clients, ...")

    def find(self, name: str) -> Path | None:
        """The user's file or folder of that name; None if there is none."""
        folders = [Path()] if self.folder is None else [self.folder, Path()]
        return next((path for folder in folders if (path := existing(name, folder)) is not None), None)

    def _file(self, name: str, setting: str) -> Path | None:
        """The Python file of a setting's `file.py:name`; None for other names."""
        path = file_of(name)
        if path is None:
            return None
        file = self.find(path)
        if file is None:
            raise ConfigError(f"{setting}: no file {path!r} in the current folder or in that of the settings file")
        return file


def own_name(rule: AnyRule) -> str:
    """The name of a rule that was passed in Python, as settings have it."""
    return OWN + as_rule(rule).name
