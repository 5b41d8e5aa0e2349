"""Doctests are collected from every module, without those whose extra is not installed; torch has one thread."""

import os
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several threads round differently, and tests run beside each other
collect_ignore_glob = ["*/conftest.py"]  # several of one name, and no doctests in them
collect_ignore = []
if find_spec("triton") is None:
    gpu = Path(__file__).parent / "src/fedgma/training/fast/gpu"
    collect_ignore += ["src/fedgma/aggregation/kernels/gpu.py", *map(str, gpu.glob("[!_]*.py"))]
if find_spec("numba") is None:
    collect_ignore.append("src/fedgma/aggregation/kernels/cpu.py")
if find_spec("flwr") is None:
    collect_ignore += ["src/fedgma/flower"]
if find_spec("nvflare") is None:
    collect_ignore += ["src/fedgma/nvflare.py", "tests/helpers/nvflare_client.py"]
if find_spec("pfl") is None:
    collect_ignore.append("src/fedgma/pfl.py")
if find_spec("ray") is None:
    collect_ignore.append("tests/experiments/ray_nodes.py")


def pytest_addoption(parser):
    """Without pytest-timeout its setting in pyproject.toml would be an unknown one."""
    if find_spec("pytest_timeout") is None:
        parser.addini("timeout", "seconds after which a test has hung; needs pytest-timeout")
