"""Why a sign mask helps or costs (C25): noise of entries, usefulness of what is masked, classes with few holders.

At some rounds of a plain run all clients are trained from the same model. The mean of all their updates is what a round
of a few sampled clients tries to estimate; an entry's share of it is how useful the entry is. Many draws of sampled
clients then show how far each rule's step lies from it, and what becomes of a class in draws with few holders.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedgma.aggregation.elections import magnitude_agreement
from fedgma.aggregation.rule import Rule
from fedgma.aggregation.rules import BASELINE, masked_mean, mean
from fedgma.experiments.materials import Materials
from fedgma.paper.analyses import AnalysisRequest, AnalysisResult
from fedgma.paper.analyses.balanced import balanced_draw, find_balanced, holders, train_balanced
from fedgma.paper.analyses.rounds import arm_of, data_and_model, specs_of, train_clients
from fedgma.paper.findings import Finding, judged
from fedgma.paper.plots.usefulness import draw_usefulness
from fedgma.seeds import generator
from fedgma.simulation import fleet as fleets
from fedgma.statistics.labels import capitalised
from fedgma.statistics.verdicts import Verdict, paired

Numbers = npt.NDArray[np.float64]
RULES: Mapping[str, Rule] = {"mean": mean(), "gma": masked_mean(0.4), "magnitude": magnitude_agreement(0.4)}
AFTER = (2, 10, 40, 120)  # rounds of training before
DRAWS = 60
BINS = 10
SETTING: Mapping[str, Any] = {
    "partition": {"name": "label_skew", "clients": 100},
    "clients_per_round": 10,
    "client_learning_rate": 0.03,
    "mask_every": 0,
    "client_test_size": 0,
}


@dataclass(frozen=True)
class Population:
    """The updates of all clients from one model, and what a round of `sampled` of them is after."""

    updates: Numbers  # [client, entry]
    sampled: int

    @property
    def target(self) -> Numbers:
        """The full federation's update [entry]."""
        return np.asarray(self.updates.mean(0))

    @property
    def error(self) -> Numbers:
        """Standard error [entry] of the mean of a draw without replacement.

        >>> Population(np.array([[1.0], [3.0], [5.0]]), sampled=3).error
        array([0.])
        """
        clients = len(self.updates)
        left = (clients - self.sampled) / max(1, clients - 1)
        return np.asarray(self.updates.std(0) * np.sqrt(left / self.sampled))

    @property
    def signal_to_noise(self) -> Numbers:
        """How many standard errors the target stands from zero; 0 for entries that no client moves."""
        error = self.error
        return np.divide(abs(self.target), error, out=np.zeros_like(error), where=error > 0)

    def draws(self, number: int, rng: np.random.Generator) -> list[npt.NDArray[np.int64]]:
        """Clients sampled as in rounds, uniformly and without replacement."""
        return [rng.choice(len(self.updates), self.sampled, replace=False) for _ in range(number)]


@dataclass(frozen=True)
class Steps:
    """What the draws gave, entry by entry: the mean of each rule's steps, its squared errors, and the mean mask."""

    step: Mapping[str, Numbers]
    squared: Mapping[str, Numbers]
    mask: Numbers


def steps_of(population: Population, draws: Sequence[npt.NDArray[np.int64]]) -> Steps:
    """Each rule over each draw."""
    target = population.target
    step = {name: np.zeros_like(target) for name in RULES}
    squared = {name: np.zeros_like(target) for name in RULES}
    mask = np.zeros_like(target)
    for draw in draws:
        for name, rule in RULES.items():
            merged = rule({"w": population.updates[draw]})
            step[name] += merged.update["w"] / len(draws)
            squared[name] += (merged.update["w"] - target) ** 2 / len(draws)
            if name == "gma" and merged.mask is not None:
                mask += merged.mask["w"] / len(draws)
    return Steps(step, squared, mask)


def noise_row(population: Population, steps: Steps, part: Any = slice(None)) -> dict[str, float]:
    """Signal and noise of some entries, and each rule's squared error over that of the mean."""
    theta, target = population.signal_to_noise[part], population.target[part]
    lengths = target**2
    error = population.error[part] ** 2
    best = np.divide(lengths * error, lengths + error, out=np.zeros_like(error), where=lengths + error > 0)
    plain = steps.squared["mean"][part].sum()
    ratios = {f"error_{name}": float(steps.squared[name][part].sum() / plain) for name in RULES if name != BASELINE}
    kept = {f"kept_{name}": float(steps.step[name][part] @ target / max(lengths.sum(), 1e-30)) for name in RULES}
    middle = {f"snr_{name}": float(np.quantile(theta, q)) for name, q in (("q10", 0.1), ("q50", 0.5), ("q90", 0.9))}
    weak = {"weak_%": 100 * float((theta < 0.95).mean()), "mask": float(steps.mask[part].mean())}
    return {**middle, **weak, **ratios, "error_best_factor": float(best.sum() / error.sum()), **kept}


def usefulness_rows(population: Population, steps: Steps) -> Iterator[dict[str, float]]:
    """Entries in ten groups by size of the full update: their share of it, their mask, and what is left of them."""
    target = population.target
    groups = np.array_split(np.argsort(abs(target), kind="stable"), BINS)
    for number, group in enumerate(groups, 1):
        signal = target[group]
        length = max(float(signal @ signal), 1e-30)
        kept = {f"kept_{name}": float(steps.step[name][group] @ signal / length) for name in RULES}
        share = 100 * length / float(target @ target)
        yield {"tenth": number, "share_%": share, "mask": float(steps.mask[group].mean()), **kept}


def holder_rows(
    population: Population,
    draws: Sequence[npt.NDArray[np.int64]],
    rows: Sequence[npt.NDArray[np.int64]],
    holds: npt.NDArray[np.bool_],
) -> Iterator[dict[str, float]]:
    """For each draw and class: sampled holders, and how far each rule moves the class's row of the output layer.

    `rows` are the entries of each class, `holds` [client, class] says who has it. A step of 1 is the mean update of the
    class's own holders.
    """
    for name, entries in enumerate(rows):
        updates = population.updates[:, entries]
        wanted = updates[holds[:, name]].mean(0)
        for draw in draws:
            merged = {rule: RULES[rule]({"w": updates[draw]}).update["w"] for rule in RULES}
            steps = {rule: float(step @ wanted / max(wanted @ wanted, 1e-30)) for rule, step in merged.items()}
            yield {"class": name, "holders": int(holds[draw, name].sum()), **steps}


def output_rows(shapes: Sequence[tuple[str, Sequence[int]]], classes: int) -> list[npt.NDArray[np.int64]]:
    """The entries of each class in the last layer: its row of the weight, and of the bias if there is one.

    >>> [rows.tolist() for rows in output_rows([("w", (3, 2)), ("b", (3,))], 3)]
    [[0, 1, 6], [2, 3, 7], [4, 5, 8]]
    """
    rows: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(classes)]
    ends = np.cumsum([int(np.prod(shape)) for _, shape in shapes])
    last = shapes[-1][0].rpartition(".")[0]
    for (name, shape), end in zip(shapes, ends, strict=True):
        if name.rpartition(".")[0] == last and shape[0] == classes:
            entries = np.arange(end - int(np.prod(shape)), end).reshape(classes, -1)
            for number in range(classes):
                rows[number].append(entries[number])
    return [np.concatenate(parts) for parts in rows]


def rows_at(fleet: fleets.Fleet, state: Any, run: int, draws: int) -> tuple[list[dict[str, Any]], ...]:
    """Rows on noise, usefulness and holders of one run at its present model."""
    spec = fleet.specs[run]
    trained, _ = train_clients(fleet, state, run, list(range(len(spec.federation.clients))))
    population = Population(trained.flat.cpu().numpy().astype(np.float64), spec.clients_per_round)
    rng = generator(spec.seed, "usefulness", int(state.rounds[run]))
    drawn = population.draws(draws, rng)
    steps, owner = steps_of(population, drawn), fleet.layers.owner.cpu().numpy()
    parts = {"all": slice(None), **{name: owner == layer for layer, name in enumerate(fleet.layers.names)}}
    noise = [{"layer": layer, **noise_row(population, steps, part)} for layer, part in parts.items()]
    holds = holders(spec)
    entries = output_rows([(name, tuple(shape)) for name, shape in fleet.shapes], holds.shape[1])
    kinds = {"uniform": drawn, "balanced": [balanced_draw(holds, spec.clients_per_round, rng) for _ in drawn]}
    rows = [
        {"sampling": kind, **row}
        for kind, chosen in kinds.items()
        for row in _by_holders(list(holder_rows(population, chosen, entries, holds)))
    ]
    return noise, list(usefulness_rows(population, steps)), rows


def _by_holders(rows: Sequence[Mapping[str, float]]) -> Iterator[dict[str, float]]:
    """Means over classes and draws with the same number of sampled holders."""
    for number in sorted({row["holders"] for row in rows}):
        same = [row for row in rows if row["holders"] == number]
        means = {rule: float(np.mean([row[rule] for row in same])) for rule in RULES}
        yield {"holders": number, "cases": len(same), **means}


def analyse(request: AnalysisRequest) -> AnalysisResult:
    """Look at plain runs after some rounds; train with class-balanced sampling beside uniform sampling."""
    chosen = data_and_model(request, "fmnist-mini")
    after = (1, 2) if request.quick else tuple(r for r in AFTER if r <= (request.rounds or max(AFTER)))
    draws = 4 if request.quick else DRAWS
    specs = specs_of(Materials(request.device), request.seed_range, **chosen, **SETTING, rounds=max(after))
    fleet = fleets.assemble([arm_of(spec, BASELINE, evaluate_every=0) for spec in specs])
    tables: dict[str, list[dict[str, Any]]] = {"noise": [], "usefulness": [], "holders": []}
    state = fleets.start(fleet)
    for point in request.follow(range(1, max(after) + 1), max(after), f"rounds of {len(specs)} runs"):
        state, _ = fleets.play_round(fleet, state)
        if point not in after:
            continue
        for run, spec in enumerate(specs):
            for name, rows in zip(tables, rows_at(fleet, state, run, draws), strict=True):
                tables[name] += [{"seed": spec.seed, "after": point, **row} for row in rows]
    tables["balanced"] = train_balanced(specs, 2 if request.quick else min(150, request.rounds or 150), request.follow)
    findings = [*find(tables), *find_balanced(tables["balanced"])]
    return AnalysisResult(tables, findings, {"usefulness": draw_usefulness(tables)})


def find(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Finding]:
    """What the last look says: errors of the rules, what the mask keeps, and the drift of a class."""
    last = max(row["after"] for row in tables["noise"])
    noise = [row for row in tables["noise"] if row["layer"] == "all" and row["after"] == last]
    rows = [row for row in tables["holders"] if row["after"] == last]
    made = []
    for name, column, text in ERRORS:
        verdict = paired([row[column] - 1 for row in noise])
        words = f"after {last} rounds {text} {{:.2f}} times that of the mean"
        made.append(_finding(f"noise/{name}", words, verdict, 1))
    for sampling in ("uniform", "balanced"):
        for rule in ("gma", "magnitude"):
            verdict = paired([_drift(rows, row["seed"], sampling, rule) for row in noise])
            words = (
                f"with {sampling} sampling {rule} moves a class by {{:.3f}} of its holders' update less than the mean"
            )
            made.append(_finding(f"drift/{sampling}/{rule}", words, verdict, 0))
    return made


ERRORS = (
    ("gma", "error_gma", "the squared error of GMA's step is"),
    ("magnitude", "error_magnitude", "the squared error of magnitude agreement's step is"),
    ("best", "error_best_factor", "the least squared error of a fixed factor for each entry is"),
)


def _drift(rows: Sequence[Mapping[str, Any]], seed: int, sampling: str, rule: str) -> float:
    """By how much less than the mean a rule moves a class towards what its holders want, over all draws."""
    kept = [row for row in rows if row["seed"] == seed and row["sampling"] == sampling]
    return float(sum(row["cases"] * (row["mean"] - row[rule]) for row in kept) / sum(row["cases"] for row in kept))


def _finding(name: str, text: str, verdict: Verdict, added: float) -> Finding:
    interval = verdict.interval
    between = "" if interval is None else f" (95 % CI {interval[0] + added:.3f} to {interval[1] + added:.3f})"
    said = f"{text.format(verdict.mean + added)}{between}, {verdict.of} seeds."
    return Finding(name, capitalised(said), judged(interval), verdict.mean, interval, verdict.of)
