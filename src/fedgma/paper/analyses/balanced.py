"""Class-balanced sampling (C25): every class has equally many holders in every round, so none is a small minority."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedgma.aggregation.rules import BASELINE
from fedgma.errors import DataError
from fedgma.paper.analyses import Follow, unseen
from fedgma.paper.analyses.rounds import arm_of, open_round
from fedgma.paper.findings import Finding, judged
from fedgma.seeds import generator
from fedgma.simulation import fleet as fleets
from fedgma.simulation.sampling import sample_clients
from fedgma.simulation.spec import RunSpec
from fedgma.statistics.labels import capitalised
from fedgma.statistics.verdicts import paired
from fedgma.training.evaluation import evaluate
from fedgma.training.stacked import unflatten

ARMS = ("mean", "gma")
SAMPLINGS = ("uniform", "balanced")
LAST = 10  # rounds whose accuracies are averaged
TRIES = 1000


def balanced_draw(holds: npt.NDArray[np.bool_], clients: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Clients such that every class has equally many holders among them, as nearly as the numbers allow.

    `holds` [client, class] says who has which class. Clients are taken in random order unless a class would have too
    many.

    >>> holds = np.eye(5, dtype=bool)[[0, 0, 0, 1, 2, 3, 4]]
    >>> sorted(holds[balanced_draw(holds, 5, np.random.default_rng(0))].argmax(1).tolist())
    [0, 1, 2, 3, 4]
    """
    quota = -(-clients * holds.sum() // holds.size)  # holders of a class in an even draw, rounded up
    for _ in range(TRIES):
        taken: list[int] = []
        counts = np.zeros(holds.shape[1], np.int64)
        for client in rng.permutation(len(holds)):
            if len(taken) < clients and (counts + holds[client] <= quota).all():
                taken.append(int(client))
                counts += holds[client]
        if len(taken) == clients:
            return np.sort(np.array(taken, np.int64))
    raise DataError(f"no {clients} of {len(holds)} clients hold every class equally often")


def holders(spec: RunSpec) -> npt.NDArray[np.bool_]:
    """Which client holds samples of which class: [client, class]."""
    labels, classes = spec.federation.train.y.cpu().numpy(), spec.federation.train.classes
    return np.stack([np.bincount(labels[index], minlength=classes) > 0 for index in spec.federation.clients])


def sampler(sampling: str) -> Callable[[RunSpec, int], npt.NDArray[np.int64]]:
    """The clients of a run in a round; both arms of a seed have the same."""

    def balanced(spec: RunSpec, round: int) -> npt.NDArray[np.int64]:
        return balanced_draw(holders(spec), spec.clients_per_round, generator(spec.seed, "balanced", round))

    return sample_clients if sampling == "uniform" else balanced


def train_balanced(specs: Sequence[RunSpec], rounds: int, follow: Follow = unseen) -> list[dict[str, Any]]:
    """The plain mean and masked averaging with both ways to sample: accuracy over the last ten rounds."""
    rows = []
    for sampling in SAMPLINGS:
        arms = [replace(arm_of(spec, arm), rounds=rounds) for arm in ARMS for spec in specs]
        numbers = follow(range(rounds), rounds, f"rounds with {sampling} sampling")
        for row, value in enumerate(_last_rounds(fleets.assemble(arms), numbers, sampler(sampling))):
            arm, spec = ARMS[row // len(specs)], specs[row % len(specs)]
            rows.append({"sampling": sampling, "arm": arm, "seed": spec.seed, "rounds": rounds, "last10_%": value})
    return rows


def _last_rounds(fleet: fleets.Fleet, rounds: Iterable[int], sampled: Callable[[RunSpec, int], Any]) -> list[float]:
    """Mean test accuracy of each run in percent over the last rounds."""
    state, accuracies = fleets.start(fleet), []
    for round in rounds:
        state, _, _ = open_round(fleet, state, sampled)
        if round >= fleet.specs[0].rounds - LAST:
            params = unflatten(state.params, fleet.shapes)
            scores = evaluate(
                fleet.score, params, state.buffers, fleet.specs[0].federation.test, batch=fleet.eval_batch
            )
            accuracies.append(100 * scores.accuracy.cpu().numpy())
    return [float(value) for value in np.mean(accuracies, 0)]


def find_balanced(rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """GMA minus the mean with each way to sample, and how much of it balanced sampling takes away."""
    value = {(row["sampling"], row["arm"], row["seed"]): row["last10_%"] for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    apart = {kind: [value[kind, "gma", seed] - value[kind, BASELINE, seed] for seed in seeds] for kind in SAMPLINGS}
    saved = [b - u for u, b in zip(apart["uniform"], apart["balanced"], strict=True)]
    texts = {f"trained/{kind}": (f"GMA minus the mean with {kind} sampling", apart[kind]) for kind in SAMPLINGS}
    texts["trained/saved"] = ("of this, class-balanced sampling saves", saved)
    made = []
    for name, (text, values) in texts.items():
        verdict = paired(values)
        between = "" if verdict.interval is None else f", 95 % CI {verdict.low:+.2f} to {verdict.high:+.2f}"
        said = f"{capitalised(text)}: {verdict.mean:+.2f} points{between}, {verdict.of} seeds."
        made.append(Finding(name, said, judged(verdict.interval), verdict.mean, verdict.interval, verdict.of))
    return made
