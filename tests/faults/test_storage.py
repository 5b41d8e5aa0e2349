"""Storage, rows C2 to C22: run folders and checkpoints survive every end of their writer, and damage is found."""

import contextlib
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import crashes
from crashes import contents
from fedgma.errors import ConfigError, DataError, IntegrityError
from fedgma.records import reader
from fedgma.records.checkpoints import checkpoint_rounds, digest, read_checkpoint, write_checkpoint
from fedgma.records.format import with_checksum
from fedgma.records.reader import read_head
from fedgma.records.writer import RunFolder
from rows import row

STATE = {"z": np.arange(3.0), "a": np.ones(2, np.float32), "m": np.array(7)}
HEAD = {"settings": {"tau": 0.4, "seed": 0}, "parameters": 1, "device": "cpu (1 threads)", "versions": {"torch": "1"}}


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
        with contextlib.suppress(crashes.Death), crashes.on_each_call(crashes.dying_at(place, how)):
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
        seen = crashes.calls_of(lambda: run.checkpoint(2, STATE), folder)
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
        seen = crashes.calls_of(lambda: run.finish(2, STATE, keep=True), folder)
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
    seen = crashes.calls_of(lambda: written(tmp_path / "a" / "run", rounds=1), tmp_path)
    made = [place for place, call in enumerate(seen) if call[0] == "mkdir"]
    for place in made:
        folder = Path(seen[place][1])
        if not folder.name.startswith("."):  # that one is renamed
            assert ("fsync", str(folder.parent)) in seen[place + 1 : place + 3], folder
    assert len(made) == 4


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
def test_c6_a_damaged_rounds_jsonl_of_a_run_that_cannot_be_repeated_is_repaired(tmp_path, caplog):
    folder = written(tmp_path / "run", rounds=6)
    lines, whole = folder / "rounds.jsonl", (folder / "rounds.jsonl").read_bytes()
    for bit in (*random.Random(7).sample(range(8 * len(whole)), 30), None):
        caplog.clear()
        lines.unlink() if bit is None else lines.write_bytes(flipped(whole, bit))
        damaged = lines.read_bytes() if lines.exists() else b""
        with RunFolder(folder, HEAD) as run:
            assert run.resume(repair=True).round == 6
        assert "rounds.jsonl is damaged" in caplog.text
        assert (folder / "rounds.damaged").read_bytes() == damaged
        found = [json.loads(line)["round"] for line in lines.read_bytes().splitlines()]
        assert found == [1, 2, 3, 4, 5, 6]
        assert resumed(folder).round == 6  # repaired for good
        shutil.rmtree(folder)
        written(folder, rounds=6)
        assert lines.read_bytes() == whole


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


def lose(name):
    def harm(folder):
        (folder / name).unlink()
        return HEAD

    return harm


def rewrite(file, **entries):
    def harm(folder):
        content = {**json.loads((folder / file).read_text()), **entries}
        (folder / file).write_text(json.dumps(with_checksum(content)))
        return HEAD

    return harm


def ask_for(**settings):
    return lambda folder: {**HEAD, "settings": {**HEAD["settings"], **settings}}


MANIFEST = "checkpoints/00000002/manifest.json"
REFUSED = {  # what is done to a folder, which gives the head of the run that comes next; the error and what it names
    "C6 no lines": (lose("rounds.jsonl"), IntegrityError, "rounds.jsonl"),
    "C6 no head": (lose("run.json"), IntegrityError, "run.json"),
    "C6 the head of another run": (rewrite("run.json", notes=["x"]), IntegrityError, r"belongs to another run\.json"),
    "C8 another tau": (ask_for(tau=9), ConfigError, "has different .*tau"),
    "C8 another seed": (ask_for(seed=9), ConfigError, "has different .*seed"),
    "C8 another model": (lambda folder: {**HEAD, "parameters": 2}, ConfigError, "has different .*parameters"),
    "C22 a later head": (rewrite("run.json", format=99), DataError, "has format 99; this version"),
    "C22 a later checkpoint": (rewrite(MANIFEST, format=99), DataError, "has format 99; this version"),
}


@row("C6")
@row(
    "C8",
    "a run folder of other settings or of another model",
    happens="it is refused before anything is written",
    seen="exit code 2 and the names of the settings that differ",
)
@row(
    "C22",
    "a run folder of a later version's format",
    happens="it is refused, and nothing is changed",
    seen="exit code 3 and the number of the format",
)
@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_does_not_fit_is_refused_and_not_changed(tmp_path, case):
    harm, error, said = REFUSED[case]
    folder = written(tmp_path / "run")
    head, before = harm(folder), contents(folder)
    with pytest.raises(error, match=said):
        resumed(folder, head)
    assert contents(folder) == before


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
    happens="one trains and the other is refused; the lock of a dead process is ignored",
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


@row(
    "C13",
    "a full disk at any write",
    happens="the run stops, earlier checkpoints stay; once there is space, the same command goes on to the same bits",
    seen="exit code 3: `cannot write to`, the folder and the system's reason, in one sentence",
)
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
