"""One run over several processes: how they are found, started, watched and ended, and that the records are the same."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from test_resume import outcome

import fedgma
from commands import call
from fedgma.errors import ConfigError, RankLost
from fedgma.experiments.ranks.launch import launch
from fedgma.experiments.ranks.places import STORE, find_place
from fedgma.records.reader import read_head

SOURCE = str(Path(fedgma.__file__).parents[1])
SETTINGS = """
dataset = "mine.npz"
model = "mine.py:Net"
algorithm = ["fedavg", "fedadam", "scaffold"]
aggregator = ["mean", "gma", "mine.py:Smooth"]
rounds = {rounds}
clients_per_round = 4
batch_size = 8
client_learning_rate = 0.05
client_test_size = 0
mask_every = 2
seed = 0

[partition]
name = "iid"
clients = 8
"""
OWN = """
    from torch import nn

    def Net(shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, classes))

    class Smooth:
        state = {"last": 0.0}

        def __call__(self, mean, last):
            return 0.5 * mean + 0.1 * last, None, {"last": mean}
"""


@pytest.fixture
def settings(tmp_path):
    """A file of nine runs on tiny data: three algorithms, each with the mean, GMA and an own rule with state."""

    def write(rounds=3):
        rng = np.random.default_rng(0)
        labels = np.arange(160) % 4
        images = rng.normal(size=(160, 1, 4, 4)) + labels[:, None, None, None]
        np.savez(tmp_path / "mine.npz", x=images.astype(np.float32), y=labels)
        (tmp_path / "mine.py").write_text(textwrap.dedent(OWN))
        (tmp_path / "settings.toml").write_text(SETTINGS.format(rounds=rounds))
        return tmp_path / "settings.toml"

    return write


def command(*words):
    return [sys.executable, "-m", "fedgma", *map(str, words)]


def environment():
    """That of a process that no launcher started."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "FEDGMA_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        plain.pop(name, None)
    return {**plain, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def heads(out):
    """What `run.json` says, without when and by which command."""
    apart = ("started", "command", "checksum")
    return {run.name: {k: v for k, v in read_head(run).items() if k not in apart} for run in sorted(out.iterdir())}


def check_same_runs(one, other):
    assert outcome(other) == outcome(one)
    assert heads(other) == heads(one)
    for run in one.iterdir():
        assert (other / run.name / "rounds.jsonl").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the ranks")
def test_two_ranks_write_the_records_of_one_process(settings, tmp_path):
    file = settings(rounds=2)
    fedgma.run(file, out=tmp_path / "one", device="cpu")
    program = [sys.executable, str(Path(__file__).parents[1] / "helpers" / "forked_ranks.py"), str(tmp_path / "store")]
    words = ("run", file, "--on", "torchrun", "--device", "cpu", "--out", tmp_path / "two", "--json")
    ran = [*program, *map(str, words)]
    done = subprocess.run(ran, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["runs"]) == 9
    check_same_runs(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_that_are_started_write_the_records_of_one_process(ranks, settings, tmp_path):
    file = settings()
    fedgma.run(file, out=tmp_path / "one", device="cpu")
    words = ("run", file, "--on", "torchrun", "--ranks", ranks, "--device", "cpu", "--out", tmp_path / "many", "--json")
    done = subprocess.run(command(*words), env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["runs"]) == 9
    check_same_runs(tmp_path / "one", tmp_path / "many")


def ranks_of(process):
    """Process ids of the ranks by rank, as Linux lists the children of their launcher."""
    found = {}
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        with open(f"/proc/{child}/environ", "rb") as file:
            given = dict(pair.split(b"=", 1) for pair in file.read().split(b"\0") if b"=" in pair)
        if b"RANK" in given:
            found[int(given[b"RANK"])] = int(child)
    return found


def wait_for_rounds(out, rounds, process):
    """Wait until every run has so many rounds."""
    while process.poll() is None:
        written = [lines.read_bytes().count(b"\n") for lines in out.glob("*/rounds.jsonl")]
        if len(written) == 9 and min(written) >= rounds:
            return
        time.sleep(0.05)
    raise AssertionError(process.communicate())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
@pytest.mark.parametrize(("victim", "ranks", "more"), [(1, 2, ()), (0, 3, ()), (2, 4, ("--replace-lost",))])
def test_a_killed_rank_costs_nothing(victim, ranks, more, settings, tmp_path):
    file, out = settings(rounds=60), tmp_path / "killed"
    words = ("run", file, "--on", "torchrun", "--ranks", ranks, "--device", "cpu", "--out", out, "-q", *more)
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command(*words, "--checkpoint-seconds", 0.2), env=environment(), **pipe) as process:
        wait_for_rounds(out, 10, process)
        before = ranks_of(process.pid)
        os.kill(before[victim], signal.SIGKILL)
        _, said = process.communicate()
    left = ranks if more else ranks - 1
    assert process.returncode == 0, said
    now = "one rank" if left == 1 else f"{left} ranks"
    assert f"fedgma: rank {victim} of {ranks} was killed (SIGKILL); the runs go on from their last checkpoints" in said
    assert said.strip().endswith(f"with {now}")
    assert not [pid for pid in before.values() if Path(f"/proc/{pid}").exists()]
    fedgma.run(file, out=tmp_path / "one", device="cpu")
    check_same_runs(tmp_path / "one", out)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_or_killed_launcher_leaves_no_ranks_and_loses_no_rounds(number, settings, tmp_path):
    file, out = settings(rounds=60), tmp_path / "stopped"
    words = ("run", file, "--on", "torchrun", "--ranks", 2, "--device", "cpu", "--out", out, "-q")
    with subprocess.Popen(command(*words), env=environment(), stderr=subprocess.PIPE, text=True) as process:
        wait_for_rounds(out, 5, process)
        ranks = ranks_of(process.pid)
        process.send_signal(number)
        _, said = process.communicate()
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "run the same command again to resume" in said
        saved = [len(list((run / "checkpoints").iterdir())) for run in out.iterdir()]
        assert all(saved)
    until = time.monotonic() + 120
    while time.monotonic() < until and [pid for pid in ranks.values() if Path(f"/proc/{pid}").exists()]:
        time.sleep(0.05)
    assert not [pid for pid in ranks.values() if Path(f"/proc/{pid}").exists()]
    subprocess.run(command(*words), env=environment(), check=True)
    fedgma.run(file, out=tmp_path / "one", device="cpu")
    check_same_runs(tmp_path / "one", out)


@pytest.mark.slow
def test_a_script_under_torchrun_shares_its_clients_and_every_process_has_the_outcome(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys, hashlib
        import numpy as np, torch
        from torch import nn
        import fedgma

        rng = np.random.default_rng(0)
        y = np.arange(160) % 4
        x = (rng.normal(size=(160, 16)) + y[:, None]).astype(np.float32)
        net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
        with torch.no_grad():
            for value in net.parameters():
                value.copy_(torch.linspace(-0.3, 0.3, value.numel()).view_as(value))
        chosen = {"rounds": 2, "partition": {"name": "iid", "clients": 8}, "clients_per_round": 4, "seed": [0, 1]}
        on = "torchrun" if "RANK" in os.environ else "here"
        for out in (None, sys.argv[1]):
            done = fedgma.run(chosen, data=(x, y), model=net, out=out, device="cpu", on=on)
        weights = hashlib.sha256(b"".join(v.numpy().tobytes() for v in done.state_dict("gma").values())).hexdigest()
        rank = os.environ.get("RANK", "0")
        open(f"{sys.argv[1]}-{rank}.txt", "w").write(f"{weights} {done.verdicts}")
        """)
    )
    alone, many = tmp_path / "alone", tmp_path / "many"
    subprocess.run([sys.executable, str(script), str(alone)], env=environment(), check=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    subprocess.run([*torchrun, "--nproc-per-node", "2", str(script), str(many)], env=environment(), check=True)
    check_same_runs(alone, many)
    texts = [Path(f"{out}-{rank}.txt").read_text() for out, rank in ((alone, 0), (many, 0), (many, 1))]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.slow
def test_processes_that_srun_would_start_meet_and_share_a_run(settings, tmp_path):
    file = settings()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(port)}
    words = ("run", file, "--on", "torchrun", "--device", "cpu", "--out", tmp_path / "two", "-q")
    tasks = [
        subprocess.Popen(command(*words), env={**environment(), **meeting, "SLURM_PROCID": str(rank)})
        for rank in range(2)
    ]
    assert [task.wait() for task in tasks] == [0, 0]
    fedgma.run(file, out=tmp_path / "one", device="cpu")
    check_same_runs(tmp_path / "one", tmp_path / "two")


RANKS = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_a_rank_that_waits_for_the_others_ends_at_once_when_it_is_asked_to(tmp_path):
    """Slurm asks once by SIGTERM; torch, which waits for half an hour, lets no handler of Python run."""
    words = ["run", "dataset=fmnist-mini", "model=logistic", "rounds=2", "--on", "torchrun", "--out", tmp_path]
    with socket.create_server(("127.0.0.1", 0)) as silent:  # in the place of the first rank
        port = str(silent.getsockname()[1])
        meeting = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "127.0.0.1", "MASTER_PORT": port}
        waiting = subprocess.Popen(command(*words), env={**environment(), **meeting, "SLURM_PROCID": "1"})
        silent.accept()[0].close()  # it has come, and comes again and again
        waiting.terminate()
        assert waiting.wait() in (-signal.SIGTERM, 128 + signal.SIGTERM)


SLURM = {
    **{"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "41234"},
    "SLURM_STEP_NODELIST": "gpu[03-06]",
}


def test_the_environment_says_which_rank_a_process_is():
    assert find_place({}) is None
    assert find_place({name: SLURM[name] for name in ("SLURM_PROCID", "SLURM_JOB_ID")}) is None  # a batch script
    assert find_place(RANKS)[:3] == (1, 4, 1)
    assert find_place({**RANKS, "LOCAL_RANK": "0"}, 4).local == 0
    assert find_place({**RANKS, STORE: "/tmp/file"}).store == "/tmp/file"
    place = find_place(SLURM)
    assert place[:3] == (5, 8, 1)
    assert place.environment == {"MASTER_ADDR": "gpu03", "MASTER_PORT": "21234"}
    chosen = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000"}
    assert find_place({**SLURM, **chosen}).environment == chosen


@pytest.mark.parametrize(
    ("given", "wanted", "said"),
    [
        (RANKS, 2, "--ranks 2: 4 processes were started, of which this is one; leave --ranks out or start 2"),
        ({**RANKS, "RANK": "4"}, None, "RANK must be from 0 to WORLD_SIZE - 1, got RANK=4 and WORLD_SIZE=4"),
        ({**RANKS, "RANK": "x"}, None, "expected a whole number in RANK, got 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, None, "but not MASTER_ADDR and MASTER_PORT; start the ranks with torchrun"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, None, "expected a list of nodes in SLURM_STEP_NODELIST"),
    ],
)
def test_an_environment_that_does_not_fit_is_one_sentence(given, wanted, said):
    with pytest.raises(ConfigError) as caught:
        find_place(given, wanted)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--on", "torchrun", "--ranks", "0"), "--ranks must be at least 1, got 0"),
        (("--ranks", "2"), "--ranks needs --on torchrun"),
        (
            ("rounds=1", "seed=0", "clients_per_round=3", "--on", "torchrun", "--ranks", "7"),
            "7 ranks are more than the 6 clients that train in a round; use --ranks 6",
        ),
        (("--replace-lost",), "--replace-lost needs --on torchrun"),
        (("--on", "ray"), "--on: expected here or torchrun, got 'ray'; for sweeps on Ray use `fedgma sweep --on ray`"),
    ],
)
def test_options_that_do_not_fit_are_one_sentence(words, said, tmp_path):
    assert call("run", "--out", tmp_path, *words) == (2, "", f"fedgma: {said}\n")


def test_without_a_gpu_the_number_of_processes_must_be_given(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    code, _, said = call("run", "--out", tmp_path, "--on", "torchrun")
    assert (code, said.count("\n")) == (2, 1)
    assert "set their number by --ranks" in said


def test_in_python_a_script_must_be_started_by_a_launcher(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 4"):
        fedgma.run({"rounds": 1}, on="torchrun")
    with pytest.raises(ConfigError, match="expected 'here' or 'torchrun', got 'moon'"):
        fedgma.run({"rounds": 1}, on="moon")


def launched(code, ranks, **options):
    """Exit code of a small Python program that runs as ranks, and what the launcher said."""
    said = []
    program = f"import os, signal, sys, time; rank, size = (int(os.environ[n]) for n in ('RANK', 'WORLD_SIZE')); {code}"
    return launch([sys.executable, "-S", "-c", program], ranks, say=said.append, **options), said


KILL = "size > 2 and (os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else sys.exit(6))"


def test_a_launcher_goes_on_with_the_ranks_that_are_left():
    code, said = launched(KILL, 3)
    assert (code, said) == (
        0,
        ["rank 1 of 3 was killed (SIGKILL); the runs go on from their last checkpoints with 2 ranks"],
    )


def test_a_launcher_gives_up_when_no_rank_is_left():
    code, said = launched("os.kill(os.getpid(), signal.SIGKILL)", 1)
    assert code == RankLost.exit_code
    assert said == ["rank 0 of 1 was killed (SIGKILL); nothing saved is lost, run the same command again to continue"]


def test_an_error_of_any_rank_ends_all_and_is_said_once():
    wait = "rank == 0 and time.sleep(1); rank == 0 and sys.exit(6); "
    code, said = launched(wait + "print('fedgma: no such file', file=sys.stderr); sys.exit(3)", 2)
    assert (code, said) == (3, ["no such file"])
    assert launched("sys.exit(2)", 2) == (2, [])  # the first rank has said it itself
