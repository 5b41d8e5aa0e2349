"""Small settings that play in a second."""

import pytest
from small_runs import SMALL


@pytest.fixture
def small():
    return {**SMALL, "seed": [0, 1]}
