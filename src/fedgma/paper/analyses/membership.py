"""Membership inference on federated global models (E16): the paper's attack, and attacks with shadow models.

The attacker can query the final global model for the logits of any image, but sees no updates and no intermediate
models. The shadow attacks also know the partition, the algorithm and its settings, and can train federations on random
halves of the data. An attacker at the server would see more and could do better. A member is a sample in the half that
the clients held, whether or not its client was ever sampled.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedgma.data.pools import Pool
from fedgma.experiments.materials import Materials
from fedgma.experiments.settings import Settings
from fedgma.paper.analyses import AnalysisRequest, AnalysisResult, Follow, unseen
from fedgma.paper.analyses.attack_tables import compare, find, summarise
from fedgma.paper.analyses.attacks import (
    ATTACKS,
    LOGISTIC,
    confidences,
    figures,
    halves,
    lira,
    logistic_attack,
    rmia,
    trade_off,
)
from fedgma.paper.analyses.rounds import MINI, arm_of, data_and_model, settings_of
from fedgma.paper.plots.attacks import draw_attacks, draw_losses
from fedgma.records.checkpoints import read_checkpoint
from fedgma.records.reader import finished, flat
from fedgma.seeds import seed as keyed
from fedgma.simulation import fleet as fleets
from fedgma.simulation.spec import RunSpec
from fedgma.simulation.state import State
from fedgma.statistics.arms import frozen
from fedgma.statistics.labels import AGGREGATION
from fedgma.training.cuda_graphs import float32_precision
from fedgma.training.evaluation import run_forward, seen_by
from fedgma.training.stacked import unflatten

__all__ = ["Models", "analyse", "attack", "confidences", "figures", "halves", "lira", "logistic_attack", "rmia", "run"]

ARMS = {"AVG": "mean", "GMA": "gma"}
SAMPLES = 10_000  # members, and as many non-members, in the paper's attack
Numbers = npt.NDArray[np.float64]


class Models(NamedTuple):
    """The answers of some models to an attacker: arrays with the model axis first."""

    train: npt.NDArray[np.float32]  # logits [model, sample, class] on the training split
    test: npt.NDArray[np.float32]
    train_labels: npt.NDArray[np.int64]
    test_labels: npt.NDArray[np.int64]
    inside: npt.NDArray[np.bool_]  # [model, sample]: whether the model was trained on it


def run(
    device: str = "auto",
    *,
    dataset: str = "fmnist",
    rounds: int = 200,
    shadows: int = 16,
    whole: int = 1,
    precision: str = "fp32",
    epochs: int = 5000,
    seed: int = 0,
    arms: Mapping[str, str] = ARMS,
    follow: Follow = unseen,
    **settings: Any,
) -> AnalysisResult:
    """Train `shadows` federations on random halves of the data, and `whole` on all of it, with and without the mask.

    All arms share halves, initial weights, sampled clients and batches. More settings (`model`, `partition`,
    `client_learning_rate`, ...) are those of a settings file; two classes a client, 100 clients, 10 a round by default.
    `arms` names the aggregators; every other arm is compared with AVG.
    """
    given = {"partition": {"name": "label_skew", "clients": 100}, "client_learning_rate": 0.01, **settings}
    (chosen,) = settings_of([0], dataset=dataset, rounds=rounds, client_test_size=0, mask_every=0, **given)
    base = Materials(device).spec(chosen)
    samples = len(base.federation.train.y)
    inside = np.concatenate([halves(shadows, samples, seed=seed), np.ones((whole, samples), bool)])
    models = train_models(base, inside, arms, precision=precision, seed=seed, follow=follow)
    model = base.model if isinstance(base.model, str) else "own"
    return attack(models, shadows, named={**_names(chosen), "model": model}, epochs=epochs)


def _names(settings: Settings) -> dict[str, Any]:
    """The settings of the runs that a row of numbers describes."""
    data = {"dataset": settings.dataset, "model": settings.model, "partition": settings.partition.name}
    return {**data, "algorithm": settings.algorithm, "rounds": settings.rounds}


def attack_runs(
    out: str | Path, wanted: Mapping[str, Any], device: str = "auto", *, epochs: int = 5000
) -> AnalysisResult | None:
    """Run the paper's attack on the finished runs in a folder that kept their final states.

    `wanted` are settings that the runs must have, by dotted name (`dataset`, `partition.name`, ...). Two runs that
    differ only in the mask are a pair; pairs that differ only in seeds are attacked together. None without a pair.
    """
    groups: dict[str, dict[str, dict[int, tuple[Settings, Path]]]] = {}
    for head, folder in finished(Path(out)):
        recorded = head["settings"]
        values = dict(flat(recorded))
        fits = values["aggregator"] in ARMS.values() and all(
            values.get(name) == value for name, value in wanted.items()
        )
        if fits and any((folder / "checkpoints").glob("*/*.json")):
            shared = frozen(values, (*AGGREGATION, "seed", "partition.seed"))
            arms = groups.setdefault(shared, {name: {} for name in ARMS.values()})
            arms[values["aggregator"]][values["seed"]] = (Settings.model_validate(_given(recorded)), folder)
    results = [_attack_pairs(arms, device, epochs) for arms in groups.values() if _paired_seeds(arms)]
    return reduce(both, results) if results else None


def _attack_pairs(runs: Mapping[str, Mapping[int, tuple[Settings, Path]]], device: str, epochs: int) -> AnalysisResult:
    """Attack runs by arm and seed; they share all other settings."""
    pairs = [runs[name][seed] for name in ARMS.values() for seed in _paired_seeds(runs)]
    return attack(saved_models(pairs, device), 0, named=_names(pairs[0][0]), epochs=epochs)


def _paired_seeds(arms: Mapping[str, Mapping[int, Any]]) -> list[int]:
    return sorted(set.intersection(*(set(seeds) for seeds in arms.values()))) if arms else []


def saved_models(runs: Sequence[tuple[Settings, Path]], device: str) -> dict[str, Models]:
    """The answers of the final models of run folders, by arm; `runs` lists the arms in turn, with the same seeds.

    Only as many members as the paper's attack uses are queried, evenly spaced.
    """
    materials = Materials(device)
    fleet = fleets.assemble([materials.spec(settings) for settings, _ in runs])
    points = [read_checkpoint(folder / "checkpoints") for _, folder in runs]
    state = fleets.restore(fleet, [point.state for point in points if point is not None])
    train, test, seeds = fleet.specs[0].federation.train, fleet.specs[0].federation.test, len(runs) // len(ARMS)
    held = np.unique(np.concatenate([np.asarray(samples) for samples in fleet.specs[0].federation.clients]))
    members = spread(held, SAMPLES)
    inside = np.ones((seeds, len(members)), bool)
    return {
        arm: answers(fleet, state, range(index * seeds, (index + 1) * seeds), train, test, inside, members)
        for index, arm in enumerate(ARMS)
    }


def spread(rows: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    """At most `size` of the rows, evenly spaced.

    >>> spread(np.arange(7), 3).tolist()
    [0, 2, 4]
    """
    return rows[:: max(1, len(rows) // size)][:size]


def _given(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Recorded settings as input for `Settings`, without unused ones, which are recorded as None."""
    return {
        name: _given(value) if isinstance(value, Mapping) else value
        for name, value in recorded.items()
        if value is not None
    }


def train_models(
    base: RunSpec,
    inside: npt.NDArray[np.bool_],
    arms: Mapping[str, str] = ARMS,
    *,
    precision: str = "fp32",
    seed: int = 0,
    follow: Follow = unseen,
) -> dict[str, Models]:
    """Train a federation for each row of `inside` and each arm as one fleet; return the answers by arm."""
    specs = []
    for name in arms.values():
        for row, chosen in enumerate(inside):
            clients = tuple(samples[chosen[samples]] for samples in base.federation.clients)
            federation = replace(base.federation, clients=clients)  # type: ignore[type-var]
            run_seed = keyed(seed, "shadow", row)
            specs.append(arm_of(base, name, federation=federation, seed=run_seed, evaluate_every=0))
    fleet = fleets.assemble(specs, precision=precision)
    state = fleets.start(fleet)
    for _ in follow(range(base.rounds), base.rounds, f"rounds of {len(specs)} runs"):
        state, _ = fleets.play_round(fleet, state)
    by_arm = {}
    for index, arm in enumerate(arms):
        rows = range(index * len(inside), (index + 1) * len(inside))
        by_arm[arm] = answers(fleet, state, rows, base.federation.train, base.federation.test, inside)
    return by_arm


def answers(
    fleet: fleets.Fleet,
    state: State,
    runs: Sequence[int],
    train: Pool,
    test: Pool,
    inside: npt.NDArray[np.bool_],
    members: npt.NDArray[np.int64] | None = None,
) -> Models:
    """The answers of some runs of a fleet on both splits; `members` limits the training samples."""

    def on(pool: Pool, rows: npt.NDArray[np.int64] | None) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        every = torch.arange(len(pool.y), device=pool.y.device)
        index = every if rows is None else every[torch.from_numpy(rows)]
        # a diverged model may return infinities; it must not stop the attack on the others
        return np.nan_to_num(logits_on(fleet, state, pool, runs, index)), pool.y[index].cpu().numpy()

    (trained, train_labels), (tested, other) = on(train, members), on(test, None)
    return Models(trained, tested, train_labels, other, inside)


@torch.no_grad()
def logits_on(
    fleet: fleets.Fleet, state: State, pool: Pool, runs: Iterable[int], index: Tensor, batch: int = 1000
) -> npt.NDArray[np.float32]:
    """Logits [run, sample, class] of some runs on samples of a pool."""
    forward = run_forward(copy.deepcopy(fleet.model).eval())
    by_run = []
    for run in runs:
        params = unflatten(state.params[run : run + 1], fleet.shapes)
        buffers = {name: value[run : run + 1] for name, value in state.buffers.items()}
        with float32_precision(fleet.precision):
            parts = [
                forward(params, buffers, pool.batch(part, seen_by(pool, part))[0])[0].float().cpu()
                for part in torch.split(index, batch)
            ]
        by_run.append(torch.cat(parts))
    return torch.stack(by_run).numpy()


def attack(
    models: dict[str, Models], shadows: int, *, named: dict[str, Any] | None = None, epochs: int = 5000
) -> AnalysisResult:
    """Attack the models of all arms: the first `shadows` models are shadows of each other, the rest saw all data."""
    named = named or {}
    rows, gaps, curves, losses = [], [], {}, []
    for arm, of_arm in models.items():
        labelled = {**named, "arm": arm}
        gaps += [{**labelled, **row} for row in train_test_gaps(of_arm, shadows)]
        attacked, curves[arm] = shadow_rows(of_arm, shadows)
        papers, read = logistic_rows(of_arm, shadows, epochs)
        rows += [{**labelled, **row} for row in [*papers, *threshold_rows(of_arm, shadows), *attacked]]
        losses += [{**labelled, **row} for row in read]
    summary, differences = summarise(rows), compare(rows)
    tables = {"attacks": summary, "differences": differences, "gaps": summarise(gaps)}
    tables |= {"targets": rows, "attacker_losses": losses}
    drawn = {"attacker_loss": draw_losses(losses)}
    if shadows:
        drawn["trade_off"] = draw_attacks(curves)
    return AnalysisResult(tables, find(differences, tables["gaps"]), drawn)


def train_test_gaps(models: Models, shadows: int) -> list[dict[str, Any]]:
    """Accuracy of every model on its training samples and on the test split; the gap explains most simple attacks."""
    right = models.train.argmax(-1) == models.train_labels
    tested = 100 * (models.test.argmax(-1) == models.test_labels).mean(1)
    trained = [100 * float(row[chosen].mean()) for row, chosen in zip(right, models.inside, strict=True)]
    return [
        {
            "models": _kind(target, shadows),
            "target": target,
            "train_%": on_train,
            "test_%": float(on_test),
            "gap": on_train - float(on_test),
        }
        for target, (on_train, on_test) in enumerate(zip(trained, tested, strict=True))
    ]


def _kind(target: int, shadows: int) -> str:
    return "half of the data" if target < shadows else "all data"


def shadow_rows(models: Models, shadows: int) -> tuple[list[dict[str, Any]], dict[str, tuple[Numbers, Numbers]]]:
    """The shadow attacks on each model in turn, and the mean ROC curve of each attack for a figure."""
    confidence = confidences(models.train[:shadows], models.train_labels)
    inside, rows = models.inside[:shadows], []
    curves: dict[str, tuple[Numbers, Numbers]] = {}
    grid = np.geomspace(1e-4, 1, 200)
    for name, scored in ATTACKS.items() if shadows else ():
        true_positives = np.zeros_like(grid)
        for target in range(shadows):
            scores = scored(confidence, inside, target)
            rows.append(
                {"attack": name, "models": _kind(target, shadows), "target": target, **figures(scores, inside[target])}
            )
            curve = trade_off(scores, inside[target])
            last = np.searchsorted(curve.false_positives, grid, side="right") - 1
            true_positives += curve.true_positives[last] / shadows
        curves[name] = (grid, true_positives)
    return rows, curves


def threshold_rows(models: Models, shadows: int) -> list[dict[str, Any]]:
    """The simplest attack on the models that saw all data: confidence in members against that in test samples."""
    train, test = confidences(models.train, models.train_labels), confidences(models.test, models.test_labels)
    rows = []
    for target in range(shadows, len(train)):
        member_scores = train[target, models.inside[target]]
        members = np.arange(len(member_scores) + test.shape[1]) < len(member_scores)
        numbers = figures(np.concatenate([member_scores, test[target]]), members)
        rows.append({"attack": "threshold", "models": _kind(target, shadows), "target": target, **numbers})
    return rows


def logistic_rows(models: Models, shadows: int, epochs: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The paper's attack on every model: members against test samples; and its losses by epoch, mean over models."""
    size = min(SAMPLES, models.test.shape[1], int(models.inside.sum(1).min()))
    members = np.stack(
        [row[spread(np.flatnonzero(inside), size)] for row, inside in zip(models.train, models.inside, strict=True)]
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    attacked = logistic_attack(
        torch.from_numpy(members).to(device), torch.from_numpy(models.test).to(device), epochs=epochs
    )
    rows: list[dict[str, Any]] = []
    losses = []
    for target, (accuracy, auc) in enumerate(zip(attacked.accuracy, attacked.auc, strict=True)):
        numbers = {"auc_%": 100 * float(auc), "accuracy_%": 100 * float(accuracy)}
        rows.append({"attack": LOGISTIC, "models": _kind(target, shadows), "target": target, **numbers})
    for kind in dict.fromkeys(row["models"] for row in rows):
        targets = [row["target"] for row in rows if row["models"] == kind]
        train, test = attacked.train_loss[targets].mean(0), attacked.test_loss[targets].mean(0)
        for epoch, train_loss, test_loss in zip(attacked.epochs.tolist(), train, test, strict=True):
            losses.append(
                {"models": kind, "epoch": epoch, "train_loss": float(train_loss), "test_loss": float(test_loss)}
            )
    return rows, losses


def analyse(request: AnalysisRequest) -> AnalysisResult:
    """E16: the printed attack on E1's ResNet18-GN on CIFAR-10, if its runs kept their final states, and shadow attacks.

    The shadow attacks train federations of LeNet: 34 on CIFAR-10 on a GPU, or on Fashion-MNIST on a CPU.
    """
    if request.quick:
        small: dict[str, Any] = {"partition": {"name": "label_skew", "clients": 20}, "epochs": 200}
        small |= data_and_model(request, MINI)
        return run(request.device, rounds=request.rounds or 3, shadows=4, follow=request.follow, **small)
    printed = attack_runs(request.out.parents[1], {"dataset": "cifar10", "model": "resnet18-gn"}, request.device)
    if Materials(request.device).device.type == "cuda":
        on_gpu: dict[str, Any] = {"dataset": "cifar10", "model": "lenet", "precision": "tf32"}
        shadowed = run(request.device, rounds=request.rounds or 1000, follow=request.follow, **on_gpu)
    else:
        shadowed = run(request.device, rounds=request.rounds or 100, whole=request.seeds, follow=request.follow)
    return shadowed if printed is None else both(printed, shadowed)


def both(first: AnalysisResult, second: AnalysisResult) -> AnalysisResult:
    """Combine two results: tables are concatenated, and all losses share one figure."""
    names = dict.fromkeys((*first.tables, *second.tables))
    tables = {name: [*first.tables.get(name, []), *second.tables.get(name, [])] for name in names}
    drawn = {**second.figures, **first.figures, "attacker_loss": draw_losses(tables["attacker_losses"])}
    return AnalysisResult(tables, [*first.findings, *second.findings[1:]], drawn)
