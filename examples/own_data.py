"""Does masking help on my data, with my model? Your own arrays and module, paired seeds, a verdict.

    python examples/own_data.py

The data are synthetic: twelve sensors measure the same four states of a machine, each with its own offset and gain.
Every sensor is a client. Replace `measure` and `Net` by your own.
"""

import numpy as np
from torch import Tensor, nn

import fedgma
from fedgma.data.files import from_arrays
from fedgma.experiments.play import Outcome

SENSORS, STATES, FEATURES = 12, 4, 16


def measure(samples: int = 2400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features [sample, feature], the state and the sensor of each sample."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(STATES, FEATURES))
    offsets, gains = rng.normal(size=(SENSORS, FEATURES)), rng.uniform(0.5, 1.5, size=(SENSORS, 1))
    state, sensor = rng.integers(STATES, size=samples), rng.integers(SENSORS, size=samples)
    x = gains[sensor] * (centres[state] + rng.normal(size=(samples, FEATURES))) + 0.5 * offsets[sensor]
    return x.astype(np.float32), state, sensor


class Net(nn.Module):
    """Two layers; any module works that can be built from an input shape and a number of classes."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(shape[0], 32), nn.ReLU(), nn.Linear(32, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Features to logits."""
        return self.layers(x)


def main(rounds: int = 30) -> Outcome:
    """Watch one run round by round, then compare with the plain mean over four seeds."""
    x, state, sensor = measure()
    data = from_arrays(x, state, client=sensor, name="sensors")
    settings = {
        "partition": {"name": "natural"},  # a client is a sensor
        "clients_per_round": 6,
        "rounds": rounds,
        "client_learning_rate": 0.02,
        "client_test_size": 0,
    }
    for result in fedgma.rounds({**settings, "aggregator": "gma", "seed": 0}, data=data, model=Net):
        if "test" in result.line:
            accuracy = 100 * result.line["test"]["accuracy"]
            print(f"round {result.line['round']:2d}: test accuracy {accuracy:.1f} %")
    outcome = fedgma.run({**settings, "seed": [0, 1, 2, 3]}, data=data, model=Net)
    for arm in outcome.arms:
        print(f"{arm.name:5s} {arm.scores['last10'].mean:.2f} % over the last ten rounds")
    for comparison in outcome.comparisons:
        print(comparison.text)
    return outcome


if __name__ == "__main__":
    main()
