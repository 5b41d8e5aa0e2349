"""The simulation of error rates, on few pages: verdicts keep their level, uncorrected ones do not."""

import pytest

from scripts import load_script


@pytest.fixture(scope="module")
def script():
    return load_script("benchmarks/error_rates.py")


def test_verdicts_keep_their_level_and_uncorrected_ones_do_not(script):
    _, _, shares = script.simulate((4, False, 400, 1))
    assert 3.5 < shares["claim"] < 6.5
    assert shares["cells"] > 25  # cells that share seeds are not independent
    assert shares["page"] > 35
    assert shares["verdict"] < 9
    assert 92 < shares["coverage"] < 98


def test_two_seeds_have_no_verdict_and_a_diverged_run_spoils_the_interval(script):
    _, _, two = script.simulate((2, False, 100, 1))
    assert (two["verdict"], two["power"]) == (0.0, 0.0)
    _, _, four = script.simulate((4, True, 400, 1))
    assert four["coverage"] < 50
