"""A real federation: SuperLink, nodes and apps as processes on loopback, TLS, node keys, a SuperLink that is killed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedgma[flower]'")
pytest.importorskip("pydantic", reason="the simulator is not installed: pip install 'fedgma[sim]'")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "flower" / "faults.py"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed; it makes the certificates")
@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="ssh-keygen is not installed; it makes the nodes' keys")
@pytest.mark.parametrize("scenario", ["clean", "restart"])
def test_the_federation_trains_the_simulators_model(scenario):
    size = ["--nodes", "2", "--rounds", "3", "--dataset", "fmnist-mini"]
    done = subprocess.run([sys.executable, SCRIPT, scenario, *size], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": same" in done.stdout
