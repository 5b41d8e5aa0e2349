"""Shared settings of the tests: helpers can be imported, hypothesis has no deadlines, long tests begin."""

import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("helpers", "faults")]

if find_spec("hypothesis") is not None:  # a GPU machine may have pytest alone
    from hypothesis import HealthCheck, settings

    slow = [HealthCheck.too_slow]  # drawing takes longer beside other processes
    settings.register_profile("steady", deadline=None, max_examples=40, derandomize=True, suppress_health_check=slow)
    settings.load_profile("steady")


@pytest.fixture(autouse=True, scope="session")
def quick():
    """Nothing waits for the disk, since no test cuts the power, and the embedded images are decoded once."""
    from fedgma.data.files import locate

    decoded = cache(locate.load_mini)

    def load_mini():
        images = decoded()
        train, test = (part._replace(x=part.x.copy(), y=part.y.copy()) for part in (images.train, images.test))
        return images._replace(train=train, test=test)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr(locate, "load_mini", load_mini)
        yield


@pytest.hookimpl(trylast=True)  # after those that are not wanted were taken out
def pytest_collection_modifyitems(config, items):
    """Long tests come first: one that began late would keep a worker busy while the others have nothing to do."""
    from order import ordered

    workers = getattr(config, "workerinput", {"workercount": 1})["workercount"]
    items[:] = ordered(items, seconds, workers)


def seconds(item):
    mark = item.get_closest_marker("long")
    return mark.args[0] if mark else 0


def pytest_runtest_setup(item):
    """Skip tests marked `gpu` where they cannot run, and say why."""
    if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
        pytest.skip(reason)


@cache
def why_no_gpu():
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    return None if find_spec("triton") else "triton is not installed"
