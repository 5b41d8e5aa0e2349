"""GPU kernels by triton's interpreter: a file of cases runs as a script of its own, where triton is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedgma.aggregation import kernels

needs_triton = pytest.mark.skipif(not kernels.TRITON, reason="triton is not installed")


def check_cases(name):
    """Run `{name}.py`; what it asserts must hold."""
    script = Path(__file__).with_name(f"{name}.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
