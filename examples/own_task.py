"""A task of your own: a loss and a metric that the library does not have, and a verdict on that metric.

    python examples/own_task.py

Sixteen households predict their power consumption from six measurements. The data are synthetic; every household has
habits of its own. What counts is the share of predictions within a tenth of the truth. The same class works on the
command line, without this program: `fedgma run task=examples/own_task.py:Consumption dataset=mine.npz`.
"""

from typing import ClassVar

import numpy as np
from torch import Tensor

import fedgma
from fedgma.data.files import from_arrays
from fedgma.experiments.outcome import Outcome

HOUSEHOLDS, FEATURES = 16, 6


class Consumption:
    """Regression by the absolute error, scored by the share of predictions within a tenth of the truth."""

    better: ClassVar = {"within": "higher", "far": "lower"}  # verdicts are about the first
    units: ClassVar = {"within": "%", "far": "kWh"}  # "%" is a share, shown in percent
    target = "float"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of each sample."""
        return (output - target).abs().mean(1)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Numbers of each sample; their means over samples are recorded."""
        error = (output - target).abs()
        return {"within": (error < 0.1 * target.abs()).float().mean(1), "far": error.mean(1)}


def measure(samples: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Measurements [sample, feature], the consumption and the household of each sample."""
    rng = np.random.default_rng(0)
    household = rng.integers(HOUSEHOLDS, size=samples)
    habits = rng.normal(size=FEATURES) + 0.3 * rng.normal(size=(HOUSEHOLDS, FEATURES))
    x = rng.normal(size=(samples, FEATURES))
    usual = 8 + np.tanh((x * habits[household]).sum(1)) * 3
    return x.astype(np.float32), usual + 0.3 * rng.normal(size=samples), household


def main(samples: int = 4800, rounds: int = 40, seeds: int = 4) -> Outcome:
    """Compare GMA with the plain mean over paired seeds, by a metric of one's own."""
    x, consumption, household = measure(samples)
    data = from_arrays(x, consumption, client=household, name="households", target=Consumption.target)
    settings = {
        "partition": "natural",  # a client is a household
        "clients_per_round": 8,
        "rounds": rounds,
        "local_epochs": 2,
        "client_learning_rate": 0.02,
        "model": "mlp",
        "seed": list(range(seeds)),
    }
    outcome = fedgma.run(settings, data=data, task=Consumption)
    print(outcome)
    return outcome


if __name__ == "__main__":
    main()
