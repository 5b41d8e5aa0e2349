"""Run folders of the paper's experiments made by hand, with accuracies of our choosing and no checkpoints."""

import hashlib
import json

import numpy as np

from fedgma.experiments.settings import record
from fedgma.paper.plans import WHOLE, plan_runs
from fedgma.paper.rates import Chosen

SPLITS = {"fedcmnist": ("seen",), "femnist": ("same_writers",)}


def folder_name(recorded, contents):
    """As format 1 named its folders."""
    text = json.dumps({"settings": recorded, "contents": contents}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_run(out, settings, level, *, rounds=None, splits=(), noise=0.0, precision="fp32"):
    """A finished run whose test accuracy rises to `level` percent; every further split is one point higher."""
    rounds = rounds or settings.rounds
    recorded = record(settings.model_copy(update={"rounds": rounds}))
    name = folder_name(recorded, {} if precision == "fp32" else {"precision": precision})
    folder = out / name
    folder.mkdir(parents=True)
    head = {"format": 1, "fingerprint": name, "settings": recorded, "device": "made", "precision": precision}
    head |= {"versions": {"fedgma": "0"}, "data": {"name": settings.dataset, "sha256": "ab" * 32}, "parameters": 61706}
    (folder / "run.json").write_text(json.dumps(head))
    rng = np.random.default_rng(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
    lines = []
    for place in range(1, rounds + 1):
        rise = level / 100 * (1 - 0.8 * np.exp(-12 * place / rounds) if place < rounds - 9 else 1.0)
        share = float(np.clip(rise + noise / 100 * rng.standard_normal(), 0, 1))
        line = {
            "round": place,
            "train": {"loss": 1.0, "accuracy": share},
            "counted": 10,
            "seconds": 0.01,
            "refused": [],
        }
        if place % settings.evaluate_every == 0 or place > rounds - 10:
            line |= {split: {"loss": 1.0, "accuracy": min(1.0, share + 0.01)} for split in splits}
            line["test"] = {"loss": 1.0, "accuracy": share}
        lines.append(json.dumps(line) + "\n")
    (folder / "rounds.jsonl").write_text("".join(lines))
    (folder / "done").write_text(json.dumps({"rounds": rounds, "sha256": "cd" * 32}))
    return folder


def varied(level, by=1e-6):
    """The level of a run, off by up to `by` points: a difference that is the same in every seed is not tested."""

    def off(settings):
        digest = hashlib.sha256(json.dumps(record(settings), sort_keys=True).encode()).digest()
        return by * digest[0] / 255

    return lambda settings: level(settings) + off(settings)


def write_experiment(out, experiment, level, *, cut=WHOLE, chosen=None, **options):
    """Every run of an experiment; `level(settings)` is the percentage that it comes to."""
    plan = plan_runs(experiment, chosen or Chosen(), cut)
    for settings in plan.grid.runs:
        write_run(out, settings, level(settings), splits=SPLITS.get(settings.dataset, ()), **options)
    return len(plan.grid.runs)
