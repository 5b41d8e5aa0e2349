"""Small settings that play in a second."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

SMALL = {
    "model": "logistic",
    "rounds": 6,
    "partition": {"clients": 20},
    "cohort": 4,
    "evaluate_every": 2,
    "mask_every": 2,
    "client_test_size": 50,
    "client_learning_rate": 0.01,
}


@pytest.fixture
def small():
    return {**SMALL, "seed": [0, 1]}
