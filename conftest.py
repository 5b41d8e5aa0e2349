"""Doctests are collected from every module; those whose extra is not installed are left out."""

from importlib.util import find_spec
from pathlib import Path

collect_ignore = []
if find_spec("triton") is None:
    collect_ignore += [str(path) for path in (Path(__file__).parent / "src/fedgma/kernels").glob("*gpu.py")]
if find_spec("numba") is None:
    collect_ignore.append("src/fedgma/kernels/cpu.py")
if find_spec("flwr") is None:
    collect_ignore += ["src/fedgma/flower", "src/fedgma/secagg.py"]
if find_spec("nvflare") is None:
    collect_ignore += ["src/fedgma/nvflare.py", "tests/nvflare_client.py"]
if find_spec("pfl") is None:
    collect_ignore.append("src/fedgma/pfl.py")
if find_spec("ray") is None:
    collect_ignore.append("tests/experiments/ray_nodes.py")
