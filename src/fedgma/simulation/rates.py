"""The rates of local training: those of a run's optimiser, and the learning rate of every step of a lane."""

from collections.abc import Sequence

import numpy as np

from fedgma.simulation.spec import RunSpec
from fedgma.training.lane_batch import RATES, TERMS
from fedgma.training.schedules import factor, factors

# settings that the rates of a lane come from, where their names differ
SETTING = {"clip": "gradient_clip", "beta1": "client_beta1", "beta2": "client_beta2", "epsilon": "client_epsilon"}


def run_rates(specs: Sequence[RunSpec]) -> np.ndarray:
    """The rates that stay the same in all rounds, float32 [run, rate]."""

    def rate(spec: RunSpec, name: str) -> float:
        return float(getattr(spec.algorithm if name in TERMS else spec, SETTING.get(name, name)))

    return np.array([[rate(spec, name) for name in RATES] for spec in specs], np.float32)


def learning_rates(specs: Sequence[RunSpec], rounds: np.ndarray, runs: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The rate of every step, float32 [lane, step], from the rounds [lane], runs [lane] and counts [lane, step]."""
    full = np.array([spec.client_learning_rate for spec in specs], np.float64)[runs]
    if any(spec.round_schedule.changes for spec in specs):
        pairs = zip(runs.tolist(), rounds.tolist(), strict=True)
        full *= [factor(specs[run].round_schedule, round - 1, specs[run].rounds) for run, round in pairs]
    rates = np.broadcast_to(full[:, None], counts.shape)
    if any(spec.step_schedule.changes for spec in specs):
        rates = rates.copy()
        for lane, (run, steps) in enumerate(zip(runs.tolist(), (counts > 0).sum(1).tolist(), strict=True)):
            rates[lane, :steps] *= factors(specs[run].step_schedule, steps)
    return rates.astype(np.float32)


def beyond_kernels(specs: Sequence[RunSpec]) -> list[str]:
    """The settings in use that the CPU kernels do not have."""
    used = {
        "client_optimizer 'adamw'": any(spec.client_optimizer == "adamw" for spec in specs),
        "label_smoothing": any(spec.label_smoothing for spec in specs),
        "scaled or perturbed gradients": any(spec.algorithm.changes_gradients for spec in specs),
    }
    return [name for name, is_used in used.items() if is_used]
