"""Determinism, rows E1 to E5 and E7: the same settings give the same bits."""

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import crashes
import fedgma
from fedgma.records.reader import read_head
from rows import row

ROOT = Path(__file__).parents[2]
ARM = {"algorithm": "fedyogi", "aggregator": "gma"}


def outcome_of(arm, out):
    crashes.play(arm, out)
    return crashes.outcome(out)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return outcome_of(ARM, tmp_path_factory.mktemp("whole"))


@row(
    "E1",
    "another number of workers that train clients",
    happens="each client is trained by one worker, and updates are added in a fixed order: the same bits",
    seen="nothing special",
)
@pytest.mark.parametrize("arm", crashes.ARMS, ids=lambda arm: "-".join(arm.values()))
def test_e1_one_two_and_four_workers_give_the_same_bits(tmp_path, monkeypatch, arm):
    clients = pytest.importorskip("fedgma.training.fast.cpu.clients", reason="numba is not installed")
    found = []
    for workers in (1, 2, 4):
        monkeypatch.setattr(clients, "available_cores", lambda workers=workers: workers)
        found.append(outcome_of(arm, tmp_path / str(workers)))
    assert found[0] == found[1] == found[2]


@row("E1")
def test_e1_runs_that_train_together_give_the_bits_of_runs_that_train_alone(tmp_path):
    crashes.play({**ARM, "seed": [0, 1, 2]}, tmp_path / "together")
    alone = {}
    for seed in range(3):
        alone |= outcome_of({**ARM, "seed": seed}, tmp_path / str(seed))
    assert crashes.outcome(tmp_path / "together") == alone


@row(
    "E2",
    "another number of torch threads",
    happens="models below a million parameters train with one thread, whatever is set; the number is recorded",
    seen="the number of threads under `device` in `run.json`; a warning if a larger model goes on with another number",
)
def test_e2_the_number_of_torch_threads_changes_no_bit(tmp_path, whole):
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert outcome_of(ARM, tmp_path) == whole
        assert torch.get_num_threads() == 2  # given back
    finally:
        torch.set_num_threads(before)
    (folder,) = tmp_path.iterdir()
    assert "1 threads" in read_head(folder)["device"]


@row(
    "E3",
    "another order of sets, names or folder entries",
    happens="nothing depends on it",
    seen="nothing special",
)
def test_e3_hash_seeds_change_no_bit(tmp_path, whole):
    code = "import sys, crashes; crashes.play({'algorithm': 'fedyogi', 'aggregator': 'gma'}, sys.argv[1])"
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "faults")])
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"  # that of this process is another one
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)
    assert crashes.outcome(tmp_path) == whole


@row("E3")
def test_e3_the_order_of_folder_entries_changes_no_bit(tmp_path, whole, monkeypatch):
    rng, listed = random.Random(3), os.listdir
    monkeypatch.setattr(os, "listdir", lambda *place: rng.sample(names := listed(*place), len(names)))
    crashes.play(ARM, tmp_path, stop=lambda played: played == 3)
    crashes.play(ARM, tmp_path)
    monkeypatch.undo()
    assert crashes.outcome(tmp_path) == whole


@row(
    "E4",
    "other code uses the global random generators",
    happens="runs neither read nor move them: every draw has a generator of its own, by seed, purpose, round and "
    "client",
    seen="nothing special",
)
def test_e4_global_generators_are_neither_read_nor_moved(tmp_path, whole):
    import torch

    def disturb(played):
        random.seed(played)
        np.random.seed(played)  # noqa: NPY002 (the disturbance)
        torch.manual_seed(played)
        torch.rand(3)
        return False

    crashes.play(ARM, tmp_path, stop=disturb)
    assert crashes.outcome(tmp_path) == whole
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    crashes.play(ARM, tmp_path / "again")
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states  # noqa: NPY002


GOLDEN = {
    "sgd": "c345cdf0ce1944b7",
    "adam": "83d5073c575d8ad2",
    "yogi": "d09dd8f93fb04627",
}


@row(
    "E5",
    "another version of Python or numpy",
    happens="aggregation of numpy arrays gives the same bits; training by torch is not promised to, and a resumed run "
    "warns of other versions",
    seen="the versions in `run.json`",
)
@pytest.mark.parametrize("name", GOLDEN)
def test_e5_aggregation_of_numpy_arrays_gives_the_recorded_bits(name):
    place = np.arange(5 * 60, dtype=np.int64)
    steps = ((place * 2654435761 % 2**32) // 2**20 - 2048).reshape(5, 60) / 1024  # few digits: sums are exact
    clients = [{"w": step.astype(np.float32)} for step in steps]
    start, optimizer = {"w": np.zeros(60, np.float32)}, fedgma.OPTIMIZERS[name](0.1)
    result = fedgma.server_round(start, clients, [1, 2, 4, 1, 8], optimizer=optimizer)
    assert hashlib.sha256(result.params["w"].tobytes()).hexdigest()[:16] == GOLDEN[name]


@row(
    "E7",
    "the simulator beside a Flower deployment",
    happens="with the same seeds and nodes, both train the same model, bit for bit",
    seen="the same SHA-256 of the final model",
)
@pytest.mark.parametrize("aggregator", ["mean", "gma"])
def test_e7_simulator_and_flower_train_the_same_model(monkeypatch, aggregator):
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedgma[flower]'")
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "flower_app"))
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "flower"))
    from test_twins import config_of, federated, simulated

    plain = {"run.tau": ""} if aggregator == "mean" else {}
    config = config_of(**{"run.algorithm": "fedyogi", "run.aggregator": aggregator, **plain})
    assert federated(config, [50, 10, 40, 20, 30]) == simulated(config)
