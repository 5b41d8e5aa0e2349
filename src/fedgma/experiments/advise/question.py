"""What `fedgma advise` asks: one federation, the rules to try on it, and rates for them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedgma.aggregation.rules import BASELINE, RULE_SETTINGS, RULES
from fedgma.errors import ConfigError
from fedgma.experiments.advise.halving import Candidate, Pair, rates_around
from fedgma.experiments.grid import AVERAGE, Grid
from fedgma.experiments.materials import Materials
from fedgma.experiments.settings import Settings, record
from fedgma.records.format import FORMAT, Head
from fedgma.records.reader import Run, flat
from fedgma.statistics.labels import arm

# rules that need no attack in mind and are no controls, in the order in which a short search tries them
TRIED = (
    BASELINE,
    "gma",
    "magnitude_agreement",
    "wiener",
    "fedexp",
    "james_stein",
    "ties",
    "norm_kept",
    "majority_sign",
    "and_mask",
)
AVERAGE_OF_MODELS = "average of models"  # an arm that is not a rule
RATES = ("client_learning_rate", "server_learning_rate")
VALIDATION = 0.2  # of each client's samples, in the search
NEVER = 10**6  # rounds between evaluations: only the last ten are evaluated
MOST_SEEDS = 8  # of the test, if the settings name no more
APART = 100  # between the seeds of the test and those of the search


class Question(NamedTuple):
    """What is asked: a federation, the arms to try and their rates."""

    arms: Mapping[str, Settings]  # by name, the plain mean first; seed, rates and rounds are set later
    pairs: tuple[Pair, ...]  # of rates, the given one first
    seeds: tuple[int, ...]
    follows: bool  # whether the partition has the seed of the run

    @property
    def base(self) -> str:
        """The name of the plain mean."""
        return next(iter(self.arms))

    @property
    def rounds(self) -> int:
        """The rounds that were asked for."""
        return self.arms[self.base].rounds

    def settings(self, candidate: Candidate, seed: int, rounds: int, *, final: bool) -> Settings:
        """The settings of a run; those of the search hold out samples and measure nothing else."""
        name, pair = candidate
        chosen = self.arms[name]
        update: dict[str, Any] = {"seed": seed, "rounds": rounds, **dict(zip(RATES, pair, strict=True))}
        if self.follows:
            update["partition"] = chosen.partition.model_copy(update={"seed": seed})
        if not final:
            held = {"validation": chosen.validation or VALIDATION, "evaluate_every": NEVER}
            update |= {**held, "client_test_size": 0, "mask_every": 0}
        return chosen.model_copy(update=update)


def ask(grid: Grid, materials: Materials, rules: Sequence[str] = ()) -> Question:
    """The question of a settings file: its rules, and unless `rules` are named, those of the library.

    An average of the server's models is tried with the library's rules. Lists of rules, of their settings, of rates and
    of seeds are candidates; any other list is refused.
    """
    if other := [axis for axis in grid.axes if axis not in ("aggregator", "seed", *RULE_SETTINGS, *RATES)]:
        raise ConfigError(f"expected settings of one federation, got a list for {', '.join(other)}; choose one value")
    runs = [materials.adopt(settings) for settings in grid.runs]
    first = runs[0]
    wanted = list(rules or dict.fromkeys([*TRIED, *(run.aggregator for run in runs)]))
    if unknown := [name for name in wanted if name not in RULES and name not in [run.aggregator for run in runs]]:
        raise ConfigError(f"unknown rule {unknown[0]!r}; known: {', '.join(RULES)}")
    arms: dict[str, Settings] = {}
    for rule in dict.fromkeys([BASELINE, *wanted]):
        runs_of_rule = [run for run in runs if run.aggregator == rule] or [
            first.model_copy(update={"aggregator": rule})
        ]
        for settings in runs_of_rule:
            arms.setdefault(name_of(settings, grid.axes), settings)
        if rule == BASELINE and not rules and _may_average(first):
            arms[AVERAGE_OF_MODELS] = first.model_copy(update={"aggregator": BASELINE, "server_average": AVERAGE})
    if len(arms) < 2:
        raise ConfigError(f"expected a rule beside {BASELINE!r} to compare with it, got none; name one with --rules")
    listed = list(dict.fromkeys((run.client_learning_rate, float(run.server_learning_rate or 1)) for run in runs))
    pairs = listed if len(listed) > 1 else rates_around(*listed[0])
    follows = all(run.partition.seed == run.seed for run in runs)
    return Question(arms, tuple(pairs), tuple(dict.fromkeys(run.seed for run in runs)), follows)


def _may_average(settings: Settings) -> bool:
    """Whether an average of models is another arm, and is defined: one of products of adapters is not."""
    return not settings.server_average and settings.adapters == "apart"


def name_of(settings: Settings, names: Sequence[str] = ()) -> str:
    """The name of a rule, with those of its settings that are in `names`."""
    head = Head(format=FORMAT, settings=record(settings))
    return arm(Run(Path(), head, dict(flat(head["settings"])), (), None), names)


def finalists(ranked: Sequence[Candidate], question: Question) -> tuple[Candidate, ...]:
    """The arms to test: the mean and the two best others, of which the average of models is one where it is tried.

    Its gain shows after more rounds than a search has, and it trains as the mean does, so it has the mean's best rates
    where the search left it out.
    """
    base, *others = ranked
    if AVERAGE_OF_MODELS not in question.arms or AVERAGE_OF_MODELS in [name for name, _ in others]:
        return tuple(ranked)
    return (base, *others[:1], (AVERAGE_OF_MODELS, base[1]))


def seeds_of_the_search(question: Question) -> tuple[int, ...]:
    """The seeds of the search, which are none of the test's."""
    first = max(question.seeds) + APART
    return tuple(range(first, first + 3))


def seeds_of_the_test(question: Question) -> tuple[int, ...]:
    """The seeds of the test: those of the settings, and the next ones if they are few."""
    more = range(max(question.seeds) + 1, max(question.seeds) + 1 + MOST_SEEDS)
    return (*question.seeds, *more)[: max(MOST_SEEDS, len(question.seeds))]
