"""The materials of a run: its settings become data on a device, a federation, a model and a `RunSpec`.

Runs share them: each data set is loaded and placed once, and each federation is made once.
"""

import logging
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from fedgma.aggregation.own import AnyRule
from fedgma.aggregation.rule import Rule
from fedgma.aggregation.rules import RULES
from fedgma.aggregation.wrappers import check_patterns, patterns_of
from fedgma.data.federation import Federation, Placed, federate, place
from fedgma.data.files import Dataset, from_data, load
from fedgma.data.partitions import Divider, Partition, by_function
from fedgma.data.poison import flip_labels, open_backdoor
from fedgma.data.pools import Pool
from fedgma.data.shifts import Colour
from fedgma.data.splits import divide, strata
from fedgma.errors import ConfigError, FedgmaError, NotEnoughClients
from fedgma.experiments.identity import code_identity, data_identity, model_identity, task_identity
from fedgma.experiments.own.defaults import fit
from fedgma.experiments.own.named import NamedCode
from fedgma.experiments.own.tasks import fitting
from fedgma.experiments.settings.clock import clock_identity, clock_of
from fedgma.experiments.settings.partition import OWN, PartitionSettings, details
from fedgma.experiments.settings.run import Settings, is_path
from fedgma.experiments.spec_parts import attack_of, device_of, local_of, optimizer_of, shift_of, wrapped
from fedgma.records.code import ModelIdentity
from fedgma.records.format import Identity
from fedgma.simulation.algorithms import ALGORITHMS
from fedgma.simulation.attacks import ATTACKS, malicious
from fedgma.simulation.rule_trial import try_rule
from fedgma.simulation.spec import RunSpec
from fedgma.training.gradients import check_precision, named_tensors
from fedgma.training.models import Model, build
from fedgma.training.task import Task
from fedgma.training.trial import trains_on_one, try_model

Data = Any  # what `fedgma.data.files.from_data` takes
LOG = logging.getLogger(__name__)


class Materials:
    """Makes specs from settings, and keeps the data sets, federations and models that several specs share."""

    def __init__(
        self,
        device: str = "auto",
        *,
        folder: Path | None = None,
        data: Data | None = None,
        model: Model | None = None,
        task: object = None,
        aggregator: AnyRule | None = None,
        partition: Divider | None = None,
        precision: str = "fp32",
        version: str | None = None,
    ) -> None:
        self.precision = check_precision(precision)
        self.version = version  # the user's name for this version of their data and code
        self.data = data
        self.code = NamedCode(folder, model, task, aggregator, partition)
        self.remarks: dict[str, None] = {}  # what was chosen to fit the user's data, and why
        self._chosen = device
        self._loaded: dict[tuple[Any, ...], Dataset] = {}
        self._placed: dict[tuple[Any, ...], Placed] = {}
        self._federations: dict[tuple[Any, ...], Federation] = {}
        self._identities: dict[tuple[Any, ...], Any] = {}
        self._tried: set[tuple[Any, ...]] = set()  # rules of the user, with the models that they were tried on
        self._smallest: dict[tuple[Any, ...], int] = {}  # batches that models can train on

    @cached_property
    def device(self) -> torch.device:
        """The device that trains: the one that was chosen; for "auto" a GPU if there is one, else the CPU."""
        return device_of(self._chosen)

    def adopt(self, settings: Settings) -> Settings:
        """The settings, with the names of what was passed in Python, and with what is open chosen to fit the data."""
        settings = self.code.named(settings)
        if self.data is not None:
            name = self.data.name if isinstance(self.data, Dataset) else "own"
            settings = settings.model_copy(update={"dataset": OWN + name})
        if not settings.dataset.startswith(OWN) and not is_path(settings.dataset):
            return settings
        fitted = fit(settings, self.dataset(settings), self.input_shape(settings))
        for remark in fitted.remarks:
            if remark not in self.remarks:
                LOG.info("%s", remark)
            self.remarks[remark] = None
        return fitted.settings

    def located(self, settings: Settings) -> Settings:
        """The settings with absolute paths of the user's files, for a process that runs elsewhere."""
        return self.code.located(settings)

    def identity(self, settings: Settings) -> Identity:
        """What decides the outcome of a run besides its settings: data, model, precision and the user's version."""
        parts = {**self._data_identity(settings), "model": self.model_identity(settings).text}
        if (rule := self._rule_identity(settings)) is not None:
            parts["rule"] = rule.text
        if ":" in settings.task:
            parts["task"] = task_identity(self.task(settings)).text
        named = {} if self.version is None else {"version": self.version}
        parts |= clock_identity(settings.clock, self.code.find)
        return cast(Identity, {**parts, "precision": self.precision, **named})

    def notes(self, settings: Settings) -> list[str]:
        """Warnings on a run's identity: code that cannot be fingerprinted, if no version was given."""
        unknown = {f"model {settings.model}": self.model_identity(settings).unknown}
        if (rule := self._rule_identity(settings)) is not None:
            unknown[f"rule {settings.aggregator}"] = rule.unknown
        if ":" in settings.task:
            unknown[f"task {settings.task}"] = task_identity(self.task(settings)).unknown
        return [
            f"the code of {what} could not be fingerprinted (it uses {', '.join(parts)}): a change "
            "there does not make new runs; give version=... and change it with the code"
            for what, parts in unknown.items()
            if parts and self.version is None
        ]

    def _rule_identity(self, settings: Settings) -> ModelIdentity | None:
        """The identity of the user's own rule; None for a rule of the library."""
        if settings.aggregator in RULES:
            return None
        key = ("rule", settings.aggregator)
        if key not in self._identities:
            self._identities[key] = code_identity(self.code.rule(settings.aggregator)[0])
        return cast(ModelIdentity, self._identities[key])

    def model_identity(self, settings: Settings) -> ModelIdentity:
        """The identity of a run's model on inputs of its data."""
        data = self.dataset(settings)
        key = ("model", settings.model, self.input_shape(settings), len(data.classes))
        if key not in self._identities:
            network = self.network(settings)
            try:
                self._identities[key] = model_identity(network, key[2], key[3])
            except FedgmaError:
                raise
            except Exception as error:
                what = f"model {settings.model} could not be built for samples of shape {key[2]}"
                raise ConfigError(f"{what} ({type(error).__name__}: {error})") from error
        return cast(ModelIdentity, self._identities[key])

    def _data_identity(self, settings: Settings) -> dict[str, str]:
        divider = self.code.divider(str(settings.partition.name))
        key = ("data", *_data_key(settings), divider)
        if key not in self._identities:
            handed_over = settings.dataset.startswith(OWN)
            self._identities[key] = data_identity(self.dataset(settings), handed_over=handed_over, divider=divider)
        return cast(dict[str, str], self._identities[key])

    def input_shape(self, settings: Settings) -> tuple[int, ...]:
        """The shape of a model's input; a colour shift turns one channel into three."""
        data = self.dataset(settings)
        shape = tuple(data.train.x.shape[1:])
        return (3, *shape[1:]) if isinstance(shift_of(settings) or data.shift, Colour) else shape

    def dataset(self, settings: Settings) -> Dataset:
        """The data set of a run, whose targets fit its task."""
        key = _data_key(settings)
        if key not in self._loaded:
            self._loaded[key] = fitting(self.task(settings), self._load(settings))
        return self._loaded[key]

    def task(self, settings: Settings) -> Task:
        """What a run's model learns: a task of the library, or of the user."""
        return self.code.task(settings.task)

    def federation(self, settings: Settings) -> Federation:
        """The federation of a run; runs with equal settings share one object."""
        part = settings.partition
        key = (*_data_key(settings), part, settings.shift, settings.validation, settings.client_test_size)
        if key not in self._federations:
            placed = self._place(settings)
            divided = self._divide(placed.dataset, part)
            self._federations[key] = federate(
                placed,
                divided,
                shift=shift_of(settings),
                validation=settings.validation,
                client_test_size=settings.client_test_size,
                seed=part.seed or 0,
            )
        return self._federations[key]

    def _divide(self, data: Dataset, part: PartitionSettings) -> Partition:
        name, seed = str(part.name), part.seed or 0
        if (divider := self.code.divider(name)) is not None:
            made = by_function(divider, strata(data), part.clients or 1, seed=seed, name=name)
            self.remarks.update(dict.fromkeys(made.notes))
            return made
        return divide(data, name, part.clients, seed=seed, **details(part))

    def poisoned(self, settings: Settings) -> Federation:
        """The federation as its malicious clients see it; without an attack on the data, the same object."""
        attack, clean = settings.attack, self.federation(settings)
        if attack.name == "none" or not ATTACKS[attack.name].poisons:
            return clean
        if self.dataset(settings).target != "class":
            raise ConfigError(f"attack: {attack.name!r} changes class labels, which task {settings.task} does not have")
        key = (id(clean), attack.name, attack.share, attack.target, attack.poisoned, settings.seed)
        if key not in self._federations:
            chosen = malicious(settings.seed, len(clean.clients), attack.share)
            if attack.name == "label_flip":
                self._federations[key] = flip_labels(clean, chosen)
            else:
                self._federations[key] = open_backdoor(
                    clean, chosen, target=attack.target, share=attack.poisoned, seed=settings.seed
                )
        return self._federations[key]

    def network(self, settings: Settings) -> Model:
        """The model of a run: a name, or what the user's file defines or the user passed."""
        return self.code.network(settings)

    def rule(self, settings: Settings) -> Rule:
        """The rule of a run: one of the library, or what the user's file defines or the user passed."""
        name = settings.aggregator
        rule = wrapped(self._library_rule(settings) if name in RULES else self._own_rule(settings), settings)
        if patterns_of(rule) and rule.space is None:
            check_patterns(rule, [name for name, _ in self._shapes(settings)])
        return rule

    def _own_rule(self, settings: Settings) -> Rule:
        """The user's rule, which is tried on arrays of the run's model first."""
        rule = self.code.rule(settings.aggregator)[1]
        key = (settings.aggregator, settings.model, *_data_key(settings), self.input_shape(settings))
        if key not in self._tried:
            try_rule(rule, self._shapes(settings), self.device)
            self._tried.add(key)
        return rule

    def _shapes(self, settings: Settings) -> tuple[tuple[str, torch.Size], ...]:
        """Names and shapes of the arrays that a run's model trains."""
        key = ("shapes", settings.model, *_data_key(settings), self.input_shape(settings))
        if key not in self._identities:
            classes = len(self.dataset(settings).classes)
            network = build(self.network(settings), self.input_shape(settings), classes, 0)
            self._identities[key] = tuple((name, value.shape) for name, value in named_tensors(network)[0].items())
        return cast(tuple[tuple[str, torch.Size], ...], self._identities[key])

    def _library_rule(self, settings: Settings) -> Rule:
        """The library's rule of that name, made from the settings that it reads and from what the run gives."""
        row = RULES[settings.aggregator]
        given = {name: getattr(settings, name) for name in row.settings if name != "population"}
        if "population" in row.settings:
            given["population"] = len(self.federation(settings).clients)
        return row.make(**given)

    def spec(self, settings: Settings) -> RunSpec:
        """The complete specification of a run, for a fleet."""
        federation = self.poisoned(settings)
        clients = len(federation.clients)
        wanted = settings.clients_per_round or min(10, clients)
        if wanted > clients:  # for `natural`, the data decide the number of clients
            raise NotEnoughClients(
                f"a round samples {wanted} clients, but there are {clients}; set clients_per_round={clients}"
            )
        return RunSpec(
            cast(Any, federation),  # it is frozen, but the protocol of a pool has writable attributes
            model=self.network(settings),
            task=self.task(settings),
            seed=settings.seed,
            rounds=settings.rounds,
            clients_per_round=wanted,
            local_epochs=settings.local_epochs or 1,
            local_steps=settings.local_steps,
            batch_size=settings.batch_size,
            smallest_batch=self._smallest_batch(settings, federation),
            augment=settings.augment,
            **local_of(settings),
            algorithm=ALGORITHMS[settings.algorithm].read(settings),
            rule=self.rule(settings),
            optimizer=optimizer_of(settings),
            weighting=settings.weighting,
            norm_factor=settings.norm_factor,
            attack=attack_of(settings),
            clock=clock_of(settings.clock, wanted, self.code.find),
            evaluate_every=settings.evaluate_every,
            evaluate_on=("test", *federation.more_tests),
            evaluate_last=10,
            per_client=settings.client_test_size > 0,
            mask_every=settings.mask_every,
        )

    def _smallest_batch(self, settings: Settings, federation: Federation) -> int:
        """The smallest batch that the model can train on, 1 or 2; the model is tried on the data first."""
        size, shape = settings.batch_size, self.input_shape(settings)
        single = any(len(index) % size == 1 % size for index in federation.clients if len(index))
        key = (settings.model, *_data_key(settings), shape, single)
        if key not in self._smallest:
            pool = cast(Pool, federation.train)  # frozen, while the protocol has writable attributes
            network = build(self.network(settings), shape, pool.classes, 0).to(pool.y.device)
            task = self.task(settings)
            if (doubt := try_model(network, pool, str(settings.model), task)) is not None:
                LOG.warning("%s", doubt)
            self._smallest[key] = 1 if not single or trains_on_one(network, pool, task) else 2
            if self._smallest[key] > 1:
                LOG.warning("model %s cannot train on one sample: a last batch of one is left out", settings.model)
        if self._smallest[key] > size:
            raise ConfigError(f"batch_size: model {settings.model} needs batches of two samples or more, got {size}")
        return self._smallest[key]

    def _place(self, settings: Settings) -> Placed:
        key = _data_key(settings)
        if key not in self._placed:
            self._placed[key] = place(self.dataset(settings), self.device)
        return self._placed[key]

    def _load(self, settings: Settings) -> Dataset:
        name, target = settings.dataset, self.task(settings).target
        if name.startswith(OWN):
            if self.data is None:
                raise ConfigError(f"dataset {name!r} was passed in Python; pass it again as data=...")
            return from_data(self.data, target=target)
        if not is_path(name):
            return load(name)
        path = self.code.find(name)
        if path is None:
            raise ConfigError(
                f"dataset: no file or folder {name!r} in the current folder or in that of the settings file"
            )
        text: Any = {"length": settings.sequence_length, "unit": settings.sequence_unit}
        return load(str(path.resolve()), target=target, **text)


def _data_key(settings: Settings) -> tuple[Any, ...]:
    """What decides how a data set is read."""
    return settings.dataset, settings.task, settings.sequence_length, settings.sequence_unit
