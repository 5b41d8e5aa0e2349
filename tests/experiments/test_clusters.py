"""Sweeps on Ray: what travels, what a task does, and a real cluster of two nodes of which one is killed."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from small_runs import SMALL
from test_resume import outcome, words

import fedgma
from commands import call
from fedgma.errors import ConfigError
from fedgma.experiments import play as experiments
from fedgma.experiments.grid import expand
from fedgma.experiments.materials import Materials
from fedgma.experiments.ray import Share, cluster_of, play_share, progress, read_share, spread, standing, write_share

CHOSEN = {**SMALL, "seed": [0, 1], "rounds": 4}


def planned(out, settings=CHOSEN, folder=None):
    return experiments.plan(expand(settings), Materials("cpu", folder=folder), out)


def share_of(runs, out, token, **changes):
    settings, fingerprints = tuple(run.settings for run in runs), tuple(run.fingerprint for run in runs)
    how = {"device": "cpu", "precision": "fp32", "checkpoint_seconds": 10.0, "keep_state": True}
    share = Share(settings, fingerprints, out, token, **how)
    return share._replace(**changes)


def test_shares_are_even_and_hold_only_what_can_play_together(tmp_path):
    runs = planned(tmp_path, {**CHOSEN, "model": ["logistic", "lenet"], "seed": list(range(6))})
    shares = spread(runs, 6)
    assert [len(share) for share in shares] == [4] * 6
    assert all(len({run.settings.model for run in share}) == 1 for share in shares)
    assert sorted(run.fingerprint for share in shares for run in share) == sorted(run.fingerprint for run in runs)


def test_a_few_runs_on_a_large_cluster_are_one_a_fleet(tmp_path):
    assert [len(share) for share in spread(planned(tmp_path), 100)] == [1, 1, 1, 1]


def test_what_travels_is_text_that_says_the_same_runs(tmp_path):
    share = share_of(planned(tmp_path, {**CHOSEN, "gradient_clip": 1.5}), tmp_path, tmp_path / "token")
    text = write_share(share)
    assert isinstance(json.loads(text), dict)
    assert read_share(text) == share


def test_a_task_plays_the_same_runs_as_a_sweep_without_ray(tmp_path):
    experiments.run(CHOSEN, out=tmp_path / "here")
    out = tmp_path / "there"
    with standing(out) as token:
        for members in spread(planned(out), 2):
            assert play_share(write_share(share_of(members, out, token))) == "{}"
    assert list(out.glob(".sweep-*")) == []
    assert outcome(out) == outcome(tmp_path / "here")


def test_a_task_stops_after_its_round_once_the_sweep_is_not_wanted(tmp_path, monkeypatch):
    runs = planned(tmp_path)
    with standing(tmp_path) as token:
        real = experiments.line_of

        def unwanted(entry, *more):
            if entry.round == 2:
                token.unlink(missing_ok=True)
            return real(entry, *more)

        monkeypatch.setattr(experiments, "line_of", unwanted)
        assert play_share(write_share(share_of(runs, tmp_path, token))) == "{}"
    assert progress(runs) == (0, 0, 4, 4 * 2, 4 * 4)  # two rounds of four runs are saved


def test_a_node_that_does_not_see_the_folder_says_so(tmp_path):
    said = json.loads(play_share(write_share(share_of(planned(tmp_path), tmp_path, tmp_path / "token"))))
    assert said["exit_code"] == 2
    assert "must lie in a folder that all nodes share" in said["error"]


def test_a_node_with_another_version_says_so(tmp_path):
    text = write_share(share_of(planned(tmp_path), tmp_path, tmp_path / "token"))
    other = text.replace(f'"fedgma": "{fedgma.__version__}"', '"fedgma": "0.0"')
    assert "started by 0.0" in json.loads(play_share(other))["error"]


def test_own_files_are_named_by_whole_paths_and_must_be_the_same_everywhere(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "mine.npz", x=rng.normal(size=(80, 3)).astype(np.float32), y=np.arange(80) % 4)
    chosen = {**CHOSEN, "dataset": "mine.npz", "partition": {"name": "iid", "clients": 4}, "client_test_size": 0}
    runs = planned(tmp_path / "out", chosen, folder=tmp_path)
    located = [Materials("cpu", folder=tmp_path).located(run.settings) for run in runs]
    assert {run.dataset for run in located} == {str(tmp_path / "mine.npz")}
    with standing(tmp_path / "out") as token:
        share = share_of(runs, tmp_path / "out", token, settings=tuple(located))
        assert play_share(write_share(share)) == "{}"
        np.savez(tmp_path / "mine.npz", x=np.zeros((80, 3), np.float32), y=np.arange(80) % 4)
        assert "has different data or model files" in json.loads(play_share(write_share(share)))["error"]


def test_a_cluster_with_gpus_gives_one_to_a_fleet_and_dead_nodes_nothing():
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}}, {"Alive": False, "Resources": {"GPU": 4.0}}]
    assert cluster_of(nodes) == (2, {"num_cpus": 1.0, "num_gpus": 1.0}, 1)
    with pytest.raises(ConfigError, match="no CPU"):
        cluster_of([{"Alive": True, "Resources": {}}])


def test_without_the_package_or_with_a_wrong_address_one_sentence_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, said = call("sweep", *words(CHOSEN), "--out", tmp_path, "--on", "ray")
    assert (code, said) == (2, "fedgma: --on ray needs the package ray: pip install 'fedgma[ray]'\n")
    code, _, said = call("sweep", *words(CHOSEN), "--out", tmp_path, "--on", "moon")
    assert (code, said) == (2, "fedgma: --on: expected here, ray or ray:HOST:PORT, got 'moon'\n")


STATEFUL = {
    **{**SMALL, "model": "lenet", "clients_per_round": 5, "client_learning_rate": 0.05},
    **{"algorithm": ["fedyogi", "scaffold"], "seed": [0, 1], "rounds": 120, "local_steps": 2},
}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray here; pip install 'fedgma[ray]'")
def test_a_node_killed_in_the_middle_of_a_sweep_costs_nothing(tmp_path):
    here = {**os.environ, "PYTHONPATH": str(Path(fedgma.__file__).parents[1]), "RAY_USAGE_STATS_ENABLED": "0"}
    script = Path(__file__).with_name("ray_nodes.py")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, str(script)], env=here, **pipes) as nodes:
        address = nodes.stdout.readline().removeprefix("address ").strip()
        command = [sys.executable, "-c", "from fedgma.cli import main; main()", "sweep", *words(STATEFUL)]
        command += ["--on", "ray", "--out", str(tmp_path / "ray"), "--device", "cpu", "--checkpoint-seconds", "1"]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env={**here, "RAY_ADDRESS": address}, **pipe) as sweep:
            both = wait_until_all_have_begun(tmp_path / "ray", 8, sweep)
            nodes.stdin.write("kill\n")
            nodes.stdin.flush()
            assert nodes.stdout.readline() == "killed\n"
            said, errors = sweep.communicate()
        nodes.stdin.close()
        nodes.wait()
    assert sweep.returncode == 0, errors
    assert 8 * 5 <= both < 8 * 120
    assert "8 runs in 2 fleets on Ray, 2 nodes" in said
    assert "1 of 2 nodes died; their fleets continue on other nodes" in said
    experiments.run(STATEFUL, out=tmp_path / "here", device="cpu")
    assert outcome(tmp_path / "ray") == outcome(tmp_path / "here")


def wait_until_all_have_begun(out, runs, sweep):
    """Rounds written by then."""
    while sweep.poll() is None:
        written = [lines.read_bytes().count(b"\n") for lines in out.glob("*/rounds.jsonl")]
        if len(written) == runs and min(written) >= 5:
            return sum(written)
        time.sleep(0.05)
    return -1
