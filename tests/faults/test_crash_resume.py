"""Crash, resume, storage, rows C1 to C22: a stopped run goes on to the same bits, or says why not."""

import contextlib
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import crashes
from commands import call
from fedgma.errors import ConfigError, DataError, IntegrityError
from fedgma.experiments import play as experiments
from fedgma.records import reader
from fedgma.records.checkpoints import checkpoint_rounds, digest, read_checkpoint, write_checkpoint
from fedgma.records.format import with_checksum
from fedgma.records.reader import read_head, read_run
from fedgma.records.writer import RunFolder
from rows import row

ROOT = Path(__file__).parents[2]
ARM = {"algorithm": "scaffold", "aggregator": "gma"}
STATE = {"z": np.arange(3.0), "a": np.ones(2, np.float32), "m": np.array(7)}
HEAD = {"settings": {"tau": 0.4, "seed": 0}, "parameters": 1, "device": "cpu (1 threads)", "versions": {"torch": "1"}}


def harness(name, *options):
    """The last line of a harness of benchmarks/faults, which must hold."""
    command = [sys.executable, str(ROOT / "benchmarks" / "faults" / f"{name}.py"), *map(str, options)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What an undisturbed run leaves."""
    out = tmp_path_factory.mktemp("whole")
    crashes.play(ARM, out)
    return crashes.outcome(out)


def stopped(out, rounds=4):
    """The folder of a run that was stopped after some rounds, with checkpoints of the last two."""
    crashes.play(ARM, out, stop=lambda played: played == rounds)
    (folder,) = out.iterdir()
    return folder


def written(folder, rounds=2):
    """A folder with some rounds and checkpoints of the last two, written without training."""
    with RunFolder(folder, HEAD) as run:
        run.resume()
        for number in range(1, rounds + 1):
            run.append({"round": number, "train": {"loss": number / 7}})
            run.checkpoint(number, {**STATE, "round": np.array(number)})
    return folder


def resumed(folder, head=HEAD):
    with RunFolder(folder, head) as run:
        return run.resume()


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


class Death(BaseException):
    """Stands for kill -9: nothing catches it."""


def dying_at(place, how):
    def act(number, name, call, arguments):
        if number < place:
            return call()
        if number == place and how == "half" and name == "write":
            crashes.write_half(call, arguments)
        elif number == place and how == "after":
            call()
        raise Death  # what a dying process would do to clean up does not happen either

    return act


@row(
    "C1",
    "kill -9 at any moment",
    happens="the same command goes on from the last checkpoint to the same model, records and mask statistics, bit for "
    "bit",
    seen="nothing special; the run ends as if it had not been killed",
)
def test_c1_kill_at_random_system_calls_and_moments_of_five_algorithms_with_and_without_a_mask():
    assert harness("kill", "--points", 30) == "30 of 30 resumed to the same bits"


@row(
    "C2",
    "kill -9 while a checkpoint is written",
    happens="the checkpoint before it is valid; a checkpoint appears whole, by one rename, or not at all",
    seen="nothing special",
)
@pytest.mark.parametrize("how", ["before", "after", "half"])
def test_c2_death_at_every_call_of_the_checkpoint_writer_leaves_a_whole_checkpoint(tmp_path, how):
    later = {**STATE, "z": np.zeros(3)}
    counted, whole = [0], {2: digest(STATE), 3: digest(later)}

    def count(number, name, call, arguments):
        counted[0] = number
        return call()

    def two_checkpoints(folder):
        write_checkpoint(folder, 1, STATE)
        write_checkpoint(folder, 2, STATE, before=1)
        return folder

    two_checkpoints(tmp_path / "count")
    with crashes.on_each_call(count):
        write_checkpoint(tmp_path / "count", 3, later, before=2)
    assert counted[0] > 15
    for place in range(1, counted[0] + 1):
        folder = two_checkpoints(tmp_path / str(place))
        with contextlib.suppress(Death), crashes.on_each_call(dying_at(place, how)):
            write_checkpoint(folder, 3, later, before=2)
        point = read_checkpoint(folder)
        assert digest(point.state) == whole[point.round]
        write_checkpoint(folder, 3, later, before=2)
        assert checkpoint_rounds(folder) == [2, 3]
        assert not list(folder.glob(".*"))  # the leftovers of the dead writer are gone


@row(
    "C3",
    "power loss after a checkpoint was written",
    happens="lines, files and folders reach the disk before the rename that publishes a checkpoint, and the rename "
    "before the next round counts",
    seen="nothing special",
)
def test_c3_write_fsync_rename_and_fsync_of_the_folder_come_in_this_order(tmp_path):
    folder = written(tmp_path / "run", rounds=1)
    with RunFolder(folder, HEAD) as run:
        run.resume()
        run.append({"round": 2})
        seen = calls_of(lambda: run.checkpoint(2, STATE), folder)
        staged = f"checkpoints/.staged-{os.getpid()}"
        assert [call for call in seen if call[0] != "open"][:9] == [
            ("fsync", "rounds.jsonl"),
            ("mkdir", staged),
            ("write", f"{staged}/state.safetensors"),
            ("fsync", f"{staged}/state.safetensors"),
            ("write", f"{staged}/manifest.json"),
            ("fsync", f"{staged}/manifest.json"),
            ("fsync", staged),
            ("rename", staged, "checkpoints/00000002"),
            ("fsync", "checkpoints"),
        ]
        seen = calls_of(lambda: run.finish(2, STATE, keep=True), folder)
        names = [call for call in seen if call[0] != "open"]
        staged = [f".{name}-{os.getpid()}" for name in ("SHA256SUMS", "done")]
        assert names[0] == ("fsync", "rounds.jsonl")
        assert names[-9:] == [
            ("write", staged[0]),
            ("fsync", staged[0]),
            ("replace", staged[0], "SHA256SUMS"),
            ("fsync", "."),
            ("write", staged[1]),
            ("fsync", staged[1]),
            ("replace", staged[1], "done"),
            ("fsync", "."),
            ("fsync", "."),
        ]


@row("C3")
def test_c3_a_new_folder_is_synced_in_the_folder_above_it(tmp_path):
    seen = calls_of(lambda: written(tmp_path / "a" / "run", rounds=1), tmp_path)
    made = [place for place, call in enumerate(seen) if call[0] == "mkdir"]
    for place in made:
        folder = Path(seen[place][1])
        if not folder.name.startswith("."):  # that one is renamed
            assert ("fsync", str(folder.parent)) in seen[place + 1 : place + 3], folder
    assert len(made) == 4


def calls_of(work, folder):
    """The calls that some work makes to the file system, with paths below a folder."""
    seen, paths = [], {}

    def named(path):
        path = paths.get(path, path)
        return os.path.relpath(path, folder) if isinstance(path, str | os.PathLike) else str(path)

    def act(number, name, call, arguments):
        result = call()
        if name == "open":
            paths[result] = arguments[0]
        places = arguments[: 2 if name in ("rename", "replace") else 1]
        seen.append((name, *map(named, places)))
        return result

    with RunFolderHandles(paths), crashes.on_each_call(act):
        work()
    return seen


class RunFolderHandles(contextlib.AbstractContextManager):
    """Files that are open already: their paths by handle."""

    def __init__(self, paths):
        for handle in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
            with contextlib.suppress(OSError):
                paths[int(handle)] = os.readlink(f"/proc/self/fd/{handle}")

    def __exit__(self, *_):
        return None


@row(
    "C4",
    "kill -9 again and again while a run resumes",
    happens="every start goes on from the last checkpoint; the results stay the same bits",
    seen="nothing special",
)
def test_c4_ten_deaths_in_a_row_cost_nothing(tmp_path, whole):
    rng, deaths = random.Random(4), 0
    while deaths < 10:
        with contextlib.suppress(Death), crashes.on_each_call(dying_at(rng.randint(1, 90), rng.choice(["half", ""]))):
            if crashes.play(ARM, tmp_path) == []:
                break
            continue
        deaths += 1
    assert deaths >= 5  # it may have come to its end before
    crashes.play(ARM, tmp_path)
    assert crashes.outcome(tmp_path) == whole


@row(
    "C5",
    "a truncated checkpoint",
    happens="the checkpoint before it is used; if there is none, the command stops and changes nothing",
    seen="a warning that names the checkpoint; or exit code 3 and what to restore or delete",
)
@pytest.mark.parametrize("file", ["state.safetensors", "manifest.json"])
def test_c5_a_checkpoint_truncated_at_any_hundredth_falls_back_to_the_one_before(tmp_path, caplog, file):
    write_checkpoint(tmp_path, 1, STATE)
    write_checkpoint(tmp_path, 2, STATE, before=1)
    whole = (tmp_path / "00000002" / file).read_bytes()
    for part in range(100):
        caplog.clear()
        (tmp_path / "00000002" / file).write_bytes(whole[: len(whole) * part // 100])
        assert read_checkpoint(tmp_path).round == 1
        assert "00000002" in caplog.text
    shutil.rmtree(tmp_path / "00000001")
    with pytest.raises(IntegrityError, match=r"no checkpoint can be used.*restore.*or delete"):
        read_checkpoint(tmp_path)


@row(
    "C6",
    "one changed bit in any file of a run folder",
    happens="checksums find it: an older checkpoint is used if there is one, else the command stops and changes "
    "nothing",
    seen="a warning, or exit code 3 and the name of the damaged file",
)
def test_c6_no_damage_to_a_file_of_a_run_folder_is_accepted_silently():
    assert harness("corrupt_checkpoints", "--count", 500).startswith("0 of 4")


@row("C6")
def test_c6_a_flipped_bit_in_rounds_jsonl_never_restarts_a_run_and_drops_no_checkpoint(tmp_path, caplog):
    folder = written(tmp_path / "run", rounds=6)
    lines, whole = folder / "rounds.jsonl", (folder / "rounds.jsonl").read_bytes()
    last = whole.rindex(b"\n", 0, len(whole) - 1)
    rng = random.Random(6)
    for bit in rng.sample(range(8 * last), 60):  # before the last line: no checkpoint belongs to these lines
        lines.write_bytes(flipped(whole, bit))
        before = contents(folder)
        with pytest.raises(IntegrityError, match=r"rounds\.jsonl"):
            resumed(folder)
        assert contents(folder) == before
    caplog.clear()
    lines.write_bytes(flipped(whole, 8 * last + 40))  # in the last line: the checkpoint before it belongs to the others
    assert resumed(folder).round == 5
    assert "rounds.jsonl" in caplog.text
    assert checkpoint_rounds(folder / "checkpoints") == [5, 6]  # the last one is still there


def flipped(content, bit):
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@row("C6")
def test_c6_a_damaged_rounds_jsonl_of_a_run_that_cannot_be_repeated_is_mended(tmp_path, caplog):
    folder = written(tmp_path / "run", rounds=6)
    lines, whole = folder / "rounds.jsonl", (folder / "rounds.jsonl").read_bytes()
    for bit in (*random.Random(7).sample(range(8 * len(whole)), 30), None):
        caplog.clear()
        lines.unlink() if bit is None else lines.write_bytes(flipped(whole, bit))
        damaged = lines.read_bytes() if lines.exists() else b""
        with RunFolder(folder, HEAD) as run:
            assert run.resume(mend=True).round == 6
        assert "rounds.jsonl is damaged" in caplog.text
        assert (folder / "rounds.damaged").read_bytes() == damaged
        found = [json.loads(line)["round"] for line in lines.read_bytes().splitlines()]
        assert found == [1, 2, 3, 4, 5, 6]
        assert resumed(folder).round == 6  # mended for good
        shutil.rmtree(folder)
        written(folder, rounds=6)
        assert lines.read_bytes() == whole


@row("C6")
@pytest.mark.parametrize("lost", ["rounds.jsonl", "run.json"])
def test_c6_the_loss_of_a_record_never_restarts_a_run_and_drops_no_checkpoint(tmp_path, lost):
    folder = written(tmp_path / "run")
    (folder / lost).unlink()
    before = contents(folder)
    with pytest.raises(IntegrityError, match=lost):
        resumed(folder)
    assert contents(folder) == before


@row("C6")
def test_c6_the_damage_stops_the_command_with_a_sentence_and_is_mended_by_what_it_says(tmp_path, whole):
    folder = stopped(tmp_path)
    lines = folder / "rounds.jsonl"
    good = lines.read_bytes()
    lines.write_bytes(good.replace(b'"round": 1', b'"round": 3', 1))
    with pytest.raises(IntegrityError, match="restore what is damaged from a copy, or delete"):
        crashes.play(ARM, tmp_path)
    lines.write_bytes(good)
    assert crashes.play(ARM, tmp_path) == [5]
    assert crashes.outcome(tmp_path) == whole


@row("C6")
def test_c6_a_damaged_line_of_a_finished_run_is_no_outcome(tmp_path):
    crashes.play(ARM, tmp_path)
    (folder,) = tmp_path.iterdir()
    lines = (folder / "rounds.jsonl").read_bytes()
    (folder / "rounds.jsonl").write_bytes(lines.replace(b'"loss": 0.', b'"loss": 1.', 1))
    with pytest.raises(IntegrityError, match=r"rounds\.jsonl does not match its checksum"):
        experiments.run({**crashes.SETTINGS, **ARM}, data=crashes.arrays(), device="cpu", out=tmp_path)
    code, _, said = call("report", tmp_path, "--out", tmp_path / "report")
    assert code == 3
    assert "rounds.jsonl does not match its checksum" in said


@row("C6")
def test_c6_files_of_another_run_do_not_belong(tmp_path):
    first, second = written(tmp_path / "a"), written(tmp_path / "b")
    assert resumed(first).round == 2
    shutil.rmtree(first / "checkpoints")
    shutil.copytree(second / "checkpoints", first / "checkpoints")
    head = json.loads((first / "run.json").read_text())
    (first / "run.json").write_text(json.dumps(with_checksum({**head, "notes": ["another"]})))
    with pytest.raises(IntegrityError, match=r"belongs to another run\.json"):
        resumed(first)


@row("C6")
def test_c6_a_finished_run_is_checked_by_sha256sum_too(tmp_path):
    crashes.play(ARM, tmp_path)
    (folder,) = tmp_path.iterdir()
    if shutil.which("sha256sum"):
        ended = subprocess.run(
            ["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, text=True, check=True
        )
        assert ended.stdout == "run.json: OK\nrounds.jsonl: OK\ndone: OK\n"
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(IntegrityError, match="SHA256SUMS is missing"):
        read_run(folder)


@row("C6")
def test_c6_deep_json_in_a_manifest_or_a_head_is_a_sentence(tmp_path):
    folder = written(tmp_path / "run")
    for deep in ("[" * 100_000, '{"a":' * 500 + "1" + "}" * 500):
        (folder / "checkpoints" / "00000002" / "manifest.json").write_text(deep)
        assert resumed(folder).round == 1
        (folder / "run.json").write_text(deep)
        with pytest.raises(IntegrityError, match=r"run\.json"):
            read_head(folder)
        shutil.rmtree(folder)
        written(folder)


@row("C6")
def test_c6_the_order_of_entries_is_part_of_a_checkpoint(tmp_path):
    for names in (["9", "4", "5", "10", "0"], ["b", "a", "c"]):
        state = {name: np.arange(place, dtype=np.float32) for place, name in enumerate(names)}
        state["round"] = np.array(3)
        write_checkpoint(tmp_path, 1, state)
        assert list(read_checkpoint(tmp_path).state) == [*names, "round"]


@row(
    "C7",
    "a file of a checkpoint is missing",
    happens="the checkpoint counts as damaged, and the one before it is used",
    seen="a warning that names the file",
)
@pytest.mark.parametrize("file", ["state.safetensors", "manifest.json"])
def test_c7_a_checkpoint_without_one_of_its_files_is_none(tmp_path, whole, caplog, file):
    folder = stopped(tmp_path)
    (folder / "checkpoints" / "00000004" / file).unlink()
    assert crashes.play(ARM, tmp_path) == [4, 5]
    assert f"{file} is missing" in caplog.text
    assert crashes.outcome(tmp_path) == whole


@row("C7")
def test_c7_the_loss_of_all_checkpoints_is_said(tmp_path, whole, caplog):
    folder = stopped(tmp_path)
    shutil.rmtree(folder / "checkpoints")
    assert crashes.play(ARM, tmp_path) == [1, 2, 3, 4, 5]
    assert "has 4 rounds but no checkpoint; it starts again from round 1" in caplog.text
    assert crashes.outcome(tmp_path) == whole


@row(
    "C8",
    "a run folder of other settings or of another model",
    happens="it is refused before anything is written",
    seen="exit code 2 and the names of the settings that differ",
)
@pytest.mark.parametrize("name", ["tau", "seed", "parameters"])
def test_c8_a_folder_of_other_settings_is_refused_with_what_differs(tmp_path, name):
    folder = written(tmp_path / "run")
    other = {**HEAD, "parameters": 2} if name == "parameters" else {**HEAD, "settings": {**HEAD["settings"], name: 9}}
    before = contents(folder)
    with pytest.raises(ConfigError, match=f"has different .*{name}"):
        resumed(folder, other)
    assert contents(folder) == before


@row("C8")
def test_c8_a_folder_under_the_name_of_another_run_is_refused(tmp_path):
    folder = stopped(tmp_path / "out")
    crashes.play({**ARM, "seed": 1}, tmp_path / "other", stop=lambda played: played == 1)
    (other,) = (tmp_path / "other").iterdir()
    folder.rename(tmp_path / "out" / other.name)
    with pytest.raises(ConfigError, match=r"different settings than this run \(differing: .*seed"):
        crashes.play({**ARM, "seed": 1}, tmp_path / "out")


@row(
    "C9",
    "a run goes on with another number of threads, on another device or with other versions",
    happens="it goes on; `run.json` holds those that it began with",
    seen="a warning with both, because the last bits may differ",
)
@pytest.mark.parametrize("part", ["device", "versions"])
def test_c9_another_device_number_of_threads_or_version_is_said(tmp_path, caplog, part):
    folder = written(tmp_path / "run")
    other = {"device": "cpu (2 threads)", "versions": {"torch": "2"}}[part]
    assert resumed(folder, {**HEAD, part: other}).round == 2
    assert f"continues with different {part}, so its results may differ in the last bits" in caplog.text
    assert read_head(folder)[part] == HEAD[part]


@row("C9")
def test_c9_the_number_of_threads_is_recorded(tmp_path):
    assert "1 threads" in read_head(stopped(tmp_path))["device"]


@row(
    "C10",
    "a finished run is started again",
    happens="nothing is trained and no file changes",
    seen="`all runs are already done`, exit code 0",
)
def test_c10_a_finished_run_is_not_touched_again(tmp_path):
    crashes.play(ARM, tmp_path)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in contents(tmp_path)}
    assert crashes.play(ARM, tmp_path) == []
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in contents(tmp_path)} == before


@row(
    "C11",
    "a finished run is started again with more rounds",
    happens="it goes on from its last state; the results are those of the longer run from the beginning",
    seen="`extends` in `run.json` names the shorter run",
)
@pytest.mark.parametrize("arm", [ARM, {"algorithm": "fedyogi", "aggregator": "mean"}])
def test_c11_more_rounds_give_what_a_longer_run_gives(tmp_path, arm):
    crashes.play({**arm, "rounds": 8}, tmp_path / "whole")
    crashes.play({**arm, "rounds": 3}, tmp_path / "grown")
    assert crashes.play({**arm, "rounds": 8}, tmp_path / "grown") == [4, 5, 6, 7, 8]
    wanted, grown = crashes.outcome(tmp_path / "whole"), crashes.outcome(tmp_path / "grown")
    assert {name: grown[name] for name in wanted} == wanted


HOLDING = """
import sys, time
from pathlib import Path
from fedgma.records.writer import RunFolder
with RunFolder(Path(sys.argv[1]), {"settings": {}, "parameters": 1}):
    print("held", flush=True)
    time.sleep(10**6)
"""


@row(
    "C12",
    "two processes on one run folder",
    happens="one trains and the other is refused; the lock of a dead process holds nobody up",
    seen="exit code 2: `another process is writing`",
)
def test_c12_a_second_process_is_refused_until_the_first_is_dead(tmp_path):
    head = {"settings": {}, "parameters": 1}
    command = [sys.executable, "-c", HOLDING, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another process is writing"):
            resumed(tmp_path / "run", head)
        holder.kill()
    with RunFolder(tmp_path / "run", head, wait=60):
        pass


@row("C12")
def test_c12_several_processes_that_start_at_once_leave_the_same_bits():
    assert harness("two_processes", "--count", 9) == "9 of 9 folders with several processes have the same bits"


@row(
    "C13",
    "a full disk at any write",
    happens="the run stops, earlier checkpoints stay; once there is space, the same command goes on to the same bits",
    seen="exit code 3: `cannot write to`, the folder and the system's reason, in one sentence",
)
def test_c13_a_full_disk_at_many_places_costs_nothing():
    assert harness("full_disk", "--sizes", 16) == "16 of 16 resumed to the same bits"


@row("C13")
def test_c13_a_full_disk_while_a_line_is_written_is_one_error_and_not_two(tmp_path):
    with RunFolder(tmp_path / "run", HEAD) as run:
        run.resume()
        run.append({"round": 1})
        with (
            crashes.on_each_call(crashes.fail_at(1, errno.ENOSPC, ever_after=True)),
            pytest.raises(DataError, match="No space left on device; nothing finished is lost"),
        ):
            run.append({"round": 2, "train": {"loss": 0.5}})
    assert (tmp_path / "run" / "rounds.jsonl").read_bytes().startswith(b'{"round": 1}\n{"round": 2')


@contextlib.contextmanager
def without_root_rights():
    """Inside, a test that root runs has the rights of a user who owns nothing."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@row(
    "C14",
    "a folder that may not be written",
    happens="the command stops before the first round",
    seen="exit code 3: `cannot write to`, the folder and `Permission denied`",
)
def test_c14_a_read_only_folder_is_refused_before_the_first_round():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        with without_root_rights(), pytest.raises(DataError, match=r"cannot write to .*Permission denied"):
            resumed(Path(folder) / "out" / "run")
        assert os.listdir(folder) == []


@row(
    "C15",
    "the temporary folder is on another file system, or missing",
    happens="nothing is staged there: temporary files are beside their targets",
    seen="nothing special",
)
def test_c15_temporary_files_are_beside_their_targets(tmp_path, monkeypatch, whole):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    seen = calls_of(lambda: crashes.play(ARM, tmp_path / "out"), tmp_path)
    moves = [call for call in seen if call[0] in ("rename", "replace")]
    assert len(moves) > 10
    assert all(os.path.dirname(source) == os.path.dirname(target) for _, source, target in moves)
    assert {call[1].split(os.sep)[0] for call in seen if call[0] in ("write", "mkdir")} == {"out"}
    assert crashes.outcome(tmp_path / "out") == whole


@row(
    "C16",
    "an input/output error while a run folder is read",
    happens="the command stops and changes nothing",
    seen="exit code 3: `cannot read`, the file and the system's reason",
)
@pytest.mark.parametrize("file", ["run.json", "rounds.jsonl", "manifest.json", "state.safetensors"])
def test_c16_an_input_output_error_names_its_file(tmp_path, monkeypatch, file):
    folder = written(tmp_path / "run")
    before, real = contents(folder), Path.read_bytes

    def failing(path):
        if path.name == file:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    monkeypatch.setattr(reader.Path, "read_bytes", failing)
    with pytest.raises(DataError, match=f"cannot read .*{file}: Input/output error") as caught:
        resumed(folder)
    monkeypatch.undo()
    assert caught.value.exit_code == 3
    assert contents(folder) == before


@row(
    "C17",
    "Ctrl-C, once or twice",
    happens="once: the round is finished and saved; twice, or before the first round has ended: the command ends at "
    "once",
    seen="exit code 130, within seconds; the same command goes on",
)
def test_c17_ctrl_c_at_any_moment_is_a_clean_exit_with_nothing_lost():
    said = harness("signals", "--signals", 3, "--kind", "INT", "--limit", 600)
    assert said == "3 of 3 clean exits with nothing lost, 0 above 600 s"


@row(
    "C18",
    "SIGTERM, for instance of a scheduler",
    happens="as Ctrl-C",
    seen="exit code 143; the same command goes on",
)
def test_c18_sigterm_at_any_moment_is_a_clean_exit_with_nothing_lost():
    said = harness("signals", "--signals", 2, "--kind", "TERM", "--limit", 600)
    assert said == "2 of 2 clean exits with nothing lost, 0 above 600 s"


@row(
    "C19",
    "half a line in `rounds.jsonl` after a crash",
    happens="it is cut off; there is one line a round, with no hole and none twice",
    seen="nothing special; reports skip it",
)
def test_c19_half_a_line_is_cut_off(tmp_path, whole):
    folder = stopped(tmp_path)
    with (folder / "rounds.jsonl").open("a") as stream:
        stream.write('{"round": 5, "train": {"lo')
    assert len(read_run(folder).rounds) == 4
    assert crashes.play(ARM, tmp_path) == [5]
    assert crashes.outcome(tmp_path) == whole


@row(
    "C20",
    "the clock jumps back or forward",
    happens="results stay the same; waiting and checkpoints go by a clock that cannot jump",
    seen="nothing special; `started` in `run.json` is the system's time",
)
def test_c20_a_clock_that_jumps_changes_nothing(tmp_path, whole, monkeypatch):
    rng = random.Random(20)
    monkeypatch.setattr(time, "time", lambda: rng.uniform(0, 4e9))
    monkeypatch.setattr(time, "gmtime", lambda *_: time.struct_time((1970, 1, 1, 0, 0, 0, 3, 1, 0)))
    crashes.play(ARM, tmp_path, every=0.01)
    monkeypatch.undo()
    assert crashes.outcome(tmp_path) == whole


@row(
    "C21",
    "old checkpoints pile up",
    happens="the newest one and the valid one before it are kept; the last valid one is never deleted",
    seen="two folders in `checkpoints`, one after the end",
)
@settings(max_examples=25)
@given(st.lists(st.sampled_from(["round", "rounds", "damage", "resume"]), max_size=12))
def test_c21_the_last_valid_checkpoint_is_never_deleted(tmp_path_factory, steps):
    folder, rounds = tmp_path_factory.mktemp("run") / "run", 0
    with contextlib.ExitStack() as opened:
        run = opened.enter_context(RunFolder(folder, HEAD))
        run.resume()
        for step in ["round", "round", *steps]:
            if step in ("damage", "resume"):
                opened.close()
                if step == "damage" and len(valid(folder)) == 2:
                    (folder / "checkpoints" / f"{valid(folder)[-1]:08d}" / "state.safetensors").write_bytes(b"")
                run = opened.enter_context(RunFolder(folder, HEAD))
                rounds = run.resume().round
            else:
                before = len(valid(folder))
                for _ in range(3 if step == "rounds" else 1):
                    rounds += 1
                    run.append({"round": rounds})
                run.checkpoint(rounds, STATE)
                assert len(valid(folder)) >= min(2, before + 1)
            assert len([old for old in checkpoint_rounds(folder / "checkpoints") if old <= rounds]) <= 3


def valid(folder):
    """Rounds whose checkpoints are whole."""
    rounds = checkpoint_rounds(folder / "checkpoints")
    return [round for round in rounds if (folder / "checkpoints" / f"{round:08d}" / "state.safetensors").stat().st_size]


@row(
    "C22",
    "a run folder of a later version's format",
    happens="it is refused, and nothing is changed",
    seen="exit code 3 and the number of the format",
)
@pytest.mark.parametrize("file", ["run.json", "checkpoints/00000002/manifest.json"])
def test_c22_a_later_format_is_refused_by_its_number(tmp_path, file):
    folder = written(tmp_path / "run")
    entries = {**json.loads((folder / file).read_text()), "format": 99}
    (folder / file).write_text(json.dumps(with_checksum(entries)))
    before = contents(folder)
    with pytest.raises(DataError, match="has format 99; this version"):
        resumed(folder)
    assert contents(folder) == before
