"""Run folders made by hand: accuracies that rise with the rounds, masks that close, everything a record can hold."""

import hashlib
import json
import math

import numpy as np

LAYERS = (
    "conv1.weight",
    "conv1.bias",
    "conv2.weight",
    "conv2.bias",
    "fc1.weight",
    "fc1.bias",
    "fc2.weight",
    "fc2.bias",
)
SETTINGS = {
    "dataset": "fmnist-mini",
    "partition": {"name": "label_skew", "clients": 100, "classes_per_client": 2, "mode": "exact", "alpha": None},
    "shift": {"name": "none", "palette": None},
    "model": "lenet",
    "algorithm": "fedavg",
    "aggregator": "gma",
    "tau": 0.4,
    "mask_position": None,
    "rounds": 30,
    "clients_per_round": 10,
    "local_epochs": 1,
    "local_steps": None,
    "batch_size": 32,
    "client_learning_rate": 0.05,
    "momentum": 0.9,
    "mu": None,
    "server_learning_rate": 1.0,
    "seed": 0,
    "evaluate_every": 1,
}


def settings(**changes):
    """The settings above with these changes; `partition={"alpha": 0.3}` changes a part."""
    made = {**SETTINGS, "partition": dict(SETTINGS["partition"])}
    for name, value in changes.items():
        made[name] = {**made[name], **value} if isinstance(value, dict) and isinstance(made.get(name), dict) else value
    made["partition"].setdefault("seed", made["seed"])
    if made["aggregator"] == "mean":
        made["tau"] = None
    return made


def accuracies(chosen, lift):
    """A saturating curve with noise of its seed that both arms share, and `lift` points on top."""
    rng = np.random.default_rng(chosen["seed"] + 1)
    rounds = np.arange(1, chosen["rounds"] + 1)
    rise = 0.25 + 0.5 * (1 - np.exp(-rounds / 8))
    own = np.random.default_rng(10_000 + chosen["seed"] + 97 * (chosen["aggregator"] == "gma"))
    noise = rng.normal(0, 0.02) + rng.normal(0, 0.012, len(rounds)) + own.normal(0, 0.004, len(rounds))
    return np.clip(rise + noise + lift / 100, 0, 1)


def mask(round, clients, tau):
    """Mask statistics of a round: clients agree less as training goes on, biases more than weights."""
    lean = 0.18 * math.exp(-round / 10)
    counts = np.array([math.comb(clients, k) for k in range(clients + 1)], float)
    share = np.arange(clients + 1) / clients
    counts *= np.exp(3 * lean * np.abs(2 * share - 1) * clients / 2)
    histogram = np.zeros(clients + 1)
    for k, weight in enumerate(counts):
        histogram[abs(2 * k - clients)] += weight
    histogram /= histogram.sum()
    agreement = float((histogram * np.arange(clients + 1)).sum() / clients)
    below = float(histogram[np.arange(clients + 1) < tau * clients - 1e-9].sum())
    layers = {
        name: {"mean": 0.6, "agreement": agreement, "below": min(1.0, below * (0.6 + 0.08 * place))}
        for place, name in enumerate(LAYERS)
    }
    numbers = {"mean": 1 - below + below * agreement, "agreement": agreement, "below": below, "ratio": 0.8 + 0.2 * lean}
    steady = {"since": round - 1, "flipped": 0.2 + 0.1 * lean, "overlap": 0.5 - lean} if round > 1 and tau else {}
    return {**numbers, **steady, "cosine": 0.9 + 0.1 * lean, "histogram": histogram.tolist(), "layers": layers}


def record(chosen, round, accuracy, extra):
    made = {
        "round": round,
        "train": {"loss": 2.3 * (1 - accuracy), "accuracy": min(1.0, float(accuracy) + 0.02)},
        "test": {"loss": 2.4 * (1 - accuracy), "accuracy": float(accuracy)},
        "mask": mask(round, chosen["clients_per_round"], chosen["tau"] or 0.0),
        "counted": chosen["clients_per_round"],
        "refused": [[3, "nonfinite"]] if round == 2 else [],
        "seconds": 0.05,
    }
    if extra:
        made["clients"] = {
            "worst_decile": max(0.0, float(accuracy) - 0.35),
            "mean": float(accuracy),
            "participating": min(1.0, float(accuracy) + 0.01),
            "non_participating": float(accuracy) - 0.01,
        }
        made["ood"] = {"loss": 3.0, "accuracy": float(accuracy) / 2}
    return made


def write_run(out, *, lift=0.0, stop=None, falls_at=None, extra=False, data=None, **changes):
    """One run folder; `stop` leaves it unfinished after so many rounds, with `falls_at` it diverges after so many."""
    chosen = settings(**changes)
    named = [chosen, data] if data else chosen
    fingerprint = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]
    folder = out / fingerprint
    folder.mkdir(parents=True)
    head = {
        "format": 1,
        "fingerprint": fingerprint,
        "settings": chosen,
        "versions": {"fedgma": "0.1.0", "python": "3.11.7", "numpy": "2.4.0", "torch": "2.13.0"},
        "device": "cpu",
        "data": {"name": chosen["dataset"], "source": "embedded", "sha256": "ab" * 32, "train": 10000, "test": 2000}
        | (data or {}),
        "parameters": 61706,
        "started": "2026-01-01T00:00:00+00:00",
    }
    (folder / "run.json").write_text(json.dumps(head, indent=1))
    values = accuracies(chosen, lift)[: stop or chosen["rounds"]]
    if falls_at is not None:
        values = [value if place < falls_at else 0.1 for place, value in enumerate(values)]
    lines = [json.dumps(record(chosen, place, value, extra)) for place, value in enumerate(values, 1)]
    (folder / "rounds.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if stop is None:
        (folder / "done").write_text(json.dumps({"rounds": len(values), "sha256": "cd" * 32}))
    return folder


def write_duel(out, *, seeds=3, lift=1.2, **changes):
    """Mean against GMA over seeds: the default experiment."""
    return [
        write_run(out, aggregator=aggregator, seed=seed, lift=lift * (aggregator == "gma"), **changes)
        for aggregator in ("mean", "gma")
        for seed in range(seeds)
    ]


def play_small(out):
    """The rounds of a real run, small and of four rounds, that is played as they are asked for."""
    import fedgma

    x = np.random.default_rng(0).normal(size=(80, 5)).astype(np.float32)
    chosen = {"model": "logistic", "partition": {"clients": 4}, "rounds": 4, "seed": 0, "client_test_size": 0}
    return fedgma.rounds({**chosen, "aggregator": "gma", "tau": 0.4}, data=(x, (x[:, 0] > 0).astype(int)), out=out)
