"""D4 to D7, D10 to D13, D18 and D19: settings files and data files that are damaged, hostile or not there."""

import ast
import hashlib
import io
import json
import pickle
import signal
import struct
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

import fedgma
from commands import call
from fedgma.data.files import cache, cifar, load
from fedgma.data.files.npy import read_npz
from fedgma.data.files.reader import VARIABLE
from fedgma.data.files.registry import Remote
from fedgma.documents import parse_json
from fedgma.errors import ConfigError, DataError, FedgmaError, IntegrityError
from fedgma.experiments.grid import read_file, read_grid
from file_server import Server
from peak_memory import peak
from rows import row

ROOT = Path(__file__).parents[2]
SOURCE = Path(fedgma.__file__).parent
MB = 1 << 20

sys.path.append(str(ROOT / "benchmarks" / "faults" / "fuzz"))
import parsers  # noqa: E402

import fuzz  # noqa: E402


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No test reads or writes the user's cache or data folders."""
    monkeypatch.setenv("FEDGMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDGMA_DATA", raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)


# -- settings files -------------------------------------------------------------------------------

HOSTILE = {
    "not UTF-8": b"tau = 0.4\xff",
    "UTF-16": "tau = 0.4".encode("utf-16"),
    "a key twice": b"tau = 0.4\ntau = 0.5",
    "a table twice": b"[partition]\nname = 'iid'\n[partition]\nclients = 3",
    "a NUL": b"tau = \x00",
    "an integer of 5,000 digits": b"seed = " + b"9" * 5000,
    "deep lists": b"seed = " + b"[" * 100_000,
    "deep tables": b"partition = " + b"{a = " * 100_000,
    "a deep key": b"a." * 200_000 + b"a = 1",
    "a deep quoted key": b'"a\\"".' * 50_000 + b'"a" = 1',
    "a deep table": b"[" + b"a." * 200_000 + b"a]",
    "lists within bounds of the parser": b"seed = " + b"[" * 500 + b"]" * 500,
    "a million runs": b"seed = ["
    + b",".join(b"%d" % n for n in range(1000))
    + b"]\nrounds = "
    + str([*range(1, 1000)]).encode(),
}


@row(
    "D4",
    "a settings file that is damaged, nested without end, huge or not text",
    happens="refused before it is parsed, or by the parser; memory stays small",
    seen="one sentence with the file's name, and with the line where there is one; exit code 2",
)
@pytest.mark.parametrize("name", HOSTILE)
def test_d4_a_hostile_settings_file_is_one_sentence_and_little_memory(tmp_path, name):
    file = tmp_path / "s.toml"
    file.write_bytes(HOSTILE[name])

    def read():
        with pytest.raises(ConfigError) as refused:
            read_grid(file)
        assert "\n" not in str(refused.value)

    assert peak(read) < 200 * MB
    assert call("run", file, "--show")[0] == 2


@row("D4")
def test_d4_a_file_of_a_gigabyte_is_not_read(tmp_path):
    file = tmp_path / "s.toml"
    with file.open("wb") as stream:
        stream.truncate(1 << 30)

    def read():
        with pytest.raises(ConfigError, match="is larger than 1048576 bytes"):
            read_file(file)

    assert peak(read) < MB


@row("D4")
def test_d4_an_empty_file_means_the_defaults(tmp_path):
    (tmp_path / "s.toml").write_bytes(b"")
    assert read_grid(tmp_path / "s.toml").runs == read_grid().runs


@row("D4")
@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 500 + b"]" * 500, b"9" * 5000])
def test_d4_json_that_is_nested_without_end_is_one_sentence(tmp_path, content):
    with pytest.raises(DataError, match=r"here is not JSON \("):
        parse_json(content, "here")
    (tmp_path / "cache" / "datasets" / "mnist").mkdir(parents=True)
    (tmp_path / "cache" / "datasets" / "mnist" / "manifest.json").write_bytes(content)
    with pytest.raises(IntegrityError, match="the manifest of the cached mnist cannot be read"):
        load("mnist")


# -- code -----------------------------------------------------------------------------------------

CODE = "from pathlib import Path\nPath({canary!r}).touch()\nclass Net: ...\n"


@row(
    "D5",
    "a settings file that names code",
    happens="names are looked up in fixed lists; only `model`, `aggregator`, `task` and `partition` can name code, as "
    "`file.py:name` or (the first two) `module:name`",
    seen="`unknown data set`, `unknown setting`, ...; exit code 2",
)
@pytest.mark.parametrize(
    "text",
    [
        "dataset = 'evil.py:Net'",
        "dataset = './evil.py'",
        "aggregator = 'evil'",
        "partition = 'evil:Net'",
        "algorithm = 'evil:Net'",
        "_target_ = 'evil.Net'",
        "partition = { _target_ = 'evil.Net' }",
        "partition = { name = '!!python/object/apply:os.system' }",
        "model = 'evil.py'",
        "augment = '__import__(\"evil\")'",
    ],
)
def test_d5_no_other_setting_runs_code(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("evil.py").write_text(CODE.format(canary=str(tmp_path / "canary")))
    Path("s.toml").write_text(text)
    code, _, said = call("sweep", "s.toml", "seed=0", "--status")
    assert code in (2, 3), said
    assert not Path("canary").exists()


@row("D5")
def test_d5_showing_settings_does_not_run_the_model_that_they_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text(CODE.format(canary=str(tmp_path / "canary")))
    assert call("run", "model=evil.py:Net", "--show")[0] == 0
    assert not Path("canary").exists()


class Bomb:
    """Unpickles as a call that creates a file."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


def object_array(canary):
    stream = io.BytesIO()
    np.save(stream, np.array([Bomb(canary)], object), allow_pickle=True)
    return stream.getvalue()


def zip_of(**members):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "."), content)
    return stream.getvalue()


PICKLES = {f"protocol {protocol}": lambda c, p=protocol: pickle.dumps(Bomb(c), p) for protocol in range(6)} | {
    "object array": object_array,
    "npz of an object array": lambda c: zip_of(x__npy=object_array(c), y__npy=parsers.npy_seeds()[2]),
    "npz of a pickle": lambda c: zip_of(x__npy=pickle.dumps(Bomb(c)), y__npy=parsers.npy_seeds()[2]),
    "torch file": lambda c: zip_of(**{"archive/data__pkl": pickle.dumps(Bomb(c)), "archive/version": b"3"}),
    "header that is code": lambda c: zip_of(x__npy=npy_header(f"__import__('pathlib').Path({str(c)!r}).touch()")),
}


def npy_header(text, data=b""):
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + data


@row(
    "D6",
    "a pickle in place of a data set, a checkpoint or an array",
    happens="never unpickled; there is no second way that would",
    seen="`object arrays are never read`, `not a .npy array`, `damaged`; exit code 3",
)
@pytest.mark.parametrize("kind", PICKLES)
@pytest.mark.parametrize("place", ["data set", "array", "checkpoint", "cache"])
def test_d6_no_file_is_unpickled(tmp_path, kind, place):
    canary, folder = tmp_path / "canary", tmp_path / "files"
    folder.mkdir()
    content = PICKLES[kind](canary)
    parse = {"data set": parsers.npz, "array": parsers.npy, "checkpoint": parsers.checkpoint, "cache": cached_array}[
        place
    ]
    with pytest.raises(DataError):
        parse(content, folder)
    assert not canary.exists()


def cached_array(content, folder):
    """The bytes as an array of a cached data set whose manifest is right."""
    manifest = json.loads(parsers.manifest_seeds()[0])
    manifest["arrays"]["train_x"] = hashlib.sha256(content).hexdigest()
    files = {"manifest.json": json.dumps(manifest).encode()}
    files |= {f"{name}.npy": array for name, array in parsers.cached_arrays().items()} | {"train_x.npy": content}
    (folder / "datasets" / "mine").mkdir(parents=True)
    for name, written in files.items():
        (folder / "datasets" / "mine" / name).write_bytes(written)
    cache.open_cached(folder, "mine")


@row("D6")
def test_d6_the_library_has_no_code_that_unpickles_or_evaluates():
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml"} & {
                name.split(".")[0] for name in names
            }, path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "torch.load", "np.loadtxt", "joblib.load"), f"{path}: {called}"
                unsafe = {(word.arg, ast.unparse(word.value)) for word in node.keywords}
                assert not unsafe & {("allow_pickle", "True"), ("weights_only", "False")}, path


@row(
    "D7",
    "CIFAR's version for Python, which is a pickle",
    happens="never opened",
    seen="the name of the binary version, which is read instead; exit code 3",
)
@pytest.mark.parametrize("name", ["cifar-10-python.tar.gz", "cifar-10-batches-py"])
def test_d7_the_pickled_cifar_is_refused(tmp_path, name):
    canary = tmp_path / "canary"
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(canary)))
    with pytest.raises(DataError, match=r"pickles.*never read.*cifar-10-binary\.tar\.gz"):
        cifar.find_cifar10(tmp_path)
    assert not canary.exists()
    assert call("data", "show", "cifar10", "--folder", tmp_path)[0] == 3


# -- checksums and downloads ----------------------------------------------------------------------


@row(
    "D10",
    "a data file with a wrong checksum",
    happens="refused; it does not enter the cache, and a downloaded one is deleted",
    seen="both checksums and what to do; exit code 3",
)
def test_d10_a_file_with_a_wrong_checksum_is_neither_used_nor_kept(tmp_path):
    np.savez(tmp_path / "mnist.npz", x=np.zeros(3))
    code, _, said = call("data", "show", "mnist", "--folder", tmp_path, "--out", tmp_path / "out")
    assert code == 3
    assert "expected sha256 ceb57726" in said
    assert not (tmp_path / "cache").exists()
    pytest.importorskip("pooch")
    from fedgma.data.files.download import fetch

    with Server({"file.bin": b"other bytes"}) as server, pytest.raises(IntegrityError, match="wrong checksum"):
        fetch(Remote("file.bin", "md5:" + "0" * 32, (server.url("file.bin"),)), tmp_path / "got", retries=0, pause=0)
    assert list((tmp_path / "got").iterdir()) == []


@row("D10")
def test_d10_one_flipped_bit_in_the_cache_is_found(tmp_path):
    folder = tmp_path / "datasets" / "mine"
    parsers.manifest(parsers.manifest_seeds()[0], tmp_path)
    assert cache.open_cached(tmp_path, "mine") is not None
    content = bytearray((folder / "test_x.npy").read_bytes())
    content[-1] ^= 1
    (folder / "test_x.npy").write_bytes(content)
    with pytest.raises(IntegrityError, match=r"the cached mine is damaged \(test_x\.npy has sha256"):
        cache.open_cached(tmp_path, "mine")


DOWNLOAD = """
import sys
from pathlib import Path
from fedgma.data.files.download import fetch
from fedgma.data.files.registry import Remote
fetch(Remote("file.bin", sys.argv[1], (sys.argv[2],)), Path(sys.argv[3]), retries=0)
"""


@row(
    "D11",
    "a download that is cut, or killed",
    happens="what came is kept under another name and never used as a data set; the next try asks for the rest",
    seen="how many bytes came, or the progress of the resumed download",
)
def test_d11_a_killed_download_is_resumed_and_never_taken_for_complete(tmp_path):
    pytest.importorskip("pooch")
    content = np.random.default_rng(0).bytes(400_000)
    checksum = "md5:" + hashlib.md5(content).hexdigest()

    def half(server, request, content):
        if len(server.asked) > 1:
            return False
        request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content[:200_000])
        request.wfile.flush()
        request.rfile.read(1)  # until the client is gone
        return True

    part = tmp_path / "file.bin.part"
    with Server({"file.bin": content}, half) as server:
        words = [sys.executable, "-c", DOWNLOAD, checksum, server.url("file.bin"), str(tmp_path)]
        killed = subprocess.Popen(words)
        while not part.exists() or not part.stat().st_size:
            assert killed.poll() is None
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert [path.name for path in tmp_path.glob("*file.bin*")] == ["file.bin.part"]
        received = part.stat().st_size
        subprocess.run(words, check=True)
    assert (tmp_path / "file.bin").read_bytes() == content
    assert server.asked == [None, f"bytes={received}-"]


@row(
    "D12",
    "no network",
    happens="nothing is downloaded unless you ask for it; a download that fails changes nothing",
    seen="where the file can be put by hand: `set FEDGMA_DATA`; exit code 3",
)
def test_d12_without_a_network_the_way_by_hand_is_named(tmp_path, monkeypatch):
    code, _, said = call("data", "show", "cifar100")  # loading never downloads
    assert code == 3
    assert "set FEDGMA_DATA to the folder that holds it, or run: fedgma data get cifar100" in said
    pytest.importorskip("pooch")
    from fedgma.data.files.download import fetch

    with pytest.raises(DataError, match="get it by hand and set FEDGMA_DATA"):
        fetch(Remote("file.bin", "md5:" + "0" * 32, ("http://127.0.0.1:9/file.bin",)), tmp_path, retries=0, pause=0)


# -- formats --------------------------------------------------------------------------------------


def npz_file(path, **arrays):
    np.savez_compressed(path, **arrays)
    return path


IMAGES = np.zeros((4, 2, 2), np.uint8)
INVALID = {
    "labels that are not there": ({"x": IMAGES}, "has no array 'y'"),
    "labels below zero": (
        {"x": IMAGES, "y": np.array([0, -1, 0, 1]), "classes": np.array(["a", "b"])},
        "labels must be from 0",
    ),
    "too many classes": ({"x": np.zeros((100_001, 1)), "y": np.arange(100_001)}, "at most 100000 different values"),
    "labels that are no integers": ({"x": IMAGES, "y": np.array([0.5, 1, 1, 0])}, "must be integers or texts"),
    "labels in a table": ({"x": IMAGES, "y": np.zeros((4, 2), int)}, "1-d array of integers"),
    "too few labels": ({"x": IMAGES, "y": np.array([0, 1])}, "one label for each of 4"),
    "a NaN": ({"x": np.full((4, 2), np.nan), "y": np.zeros(4, int)}, "must be finite"),
    "beyond float32": ({"x": np.full((4, 2), 1e300), "y": np.zeros(4, int)}, "must be finite"),
    "a single number": ({"x": np.float32(1), "y": np.zeros(4, int)}, "must have an axis of samples"),
    "texts": ({"x": np.array(["a"] * 4), "y": np.zeros(4, int)}, "must be uint8 images or float features"),
    "ids beyond 63 bits": (
        {"x": IMAGES, "y": np.zeros(4, int), "client": np.full(4, 2**63, np.uint64)},
        r"below 2\*\*63",
    ),
    "fewer names than classes": (
        {"x": IMAGES, "y": np.arange(4), "classes": np.array("a")},
        "labels must be from 0 to 0",
    ),
}


@row(
    "D13",
    "a data file with a wrong header, wrong sizes, labels out of range or a NaN",
    happens="refused before anything is trained; every parser is fuzzed",
    seen="what the file holds and what was expected; exit code 3",
)
@pytest.mark.parametrize("name", INVALID)
def test_d13_invalid_arrays_are_refused(tmp_path, name):
    arrays, said = INVALID[name]
    with pytest.raises(DataError, match=said):
        load(str(npz_file(tmp_path / "mine.npz", **arrays)))
    words = ("partition.name=iid", "partition.clients=2", "model=logistic", "rounds=1", "seed=0")
    code, _, told = call("run", f"dataset={tmp_path / 'mine.npz'}", *words, "--out", tmp_path / "runs")
    assert (code, "Traceback" in told) == (3, False)
    assert not (tmp_path / "runs").exists()


@row("D13")
@pytest.mark.parametrize("name", fuzz.available())
def test_d13_mutated_inputs_of_every_parser_are_read_or_refused(name):
    for seed in parsers.PARSERS[name].seeds()[:2]:
        assert len(seed) > 8
    faults = fuzz.plain(name, 13, range(200))
    assert not faults, faults[0]


@row("D13")
def test_d13_the_fuzzer_sees_an_error_that_is_not_ours(tmp_path, monkeypatch):
    def broken(content, folder):
        raise IndexError("string index out of range")

    monkeypatch.setitem(parsers.PARSERS, "idx", parsers.PARSERS["idx"]._replace(parse=broken))
    assert "IndexError" in fuzz.attempt("idx", b"", tmp_path)


@row("D13")
@pytest.mark.parametrize(
    "shape", ["(10000000000000,)", "(0, 10000000000000000000000)", "(9" + "9" * 5000 + ",)", "(-1,)", "(1,) * 9", "(3"]
)
def test_d13_an_array_that_announces_what_it_does_not_hold_takes_no_memory(tmp_path, shape):
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}"
    (tmp_path / "a.npz").write_bytes(zip_of(x__npy=npy_header(header, bytes(64))))

    def read():
        with pytest.raises(DataError):
            read_npz(tmp_path / "a.npz")

    assert peak(read) < MB


@row("D13")
def test_d13_arrays_are_read_as_numpy_reads_them(tmp_path):
    arrays = {
        "f": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "big": np.arange(4, dtype=">i4"),
        "text": np.array(["a", "bcd"]),
        "bool": np.array([True, False]),
        "scalar": np.float64(3),
        "empty": np.zeros((0, 3), np.uint8),
    }
    read = read_npz(npz_file(tmp_path / "a.npz", **arrays))
    for name, array in arrays.items():
        assert np.array_equal(read[name], array), name
        assert read[name].dtype == np.asarray(array).dtype


# -- shared caches and odd names ------------------------------------------------------------------


@row(
    "D18",
    "eight processes that fill one cache at once",
    happens="each writes a folder of its own and renames it; all read the same data",
    seen="nothing; a cache that cannot be written is left out with a warning",
)
def test_d18_eight_processes_may_fill_one_cache_at_once(tmp_path):
    for stem, count in (("train", 20), ("t10k", 10)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = np.broadcast_to(labels[:, None, None], (count, 28, 28)).tobytes()
        (tmp_path / "mnist").mkdir(exist_ok=True)
        for kind, shape, content in (
            ("images-idx3", (count, 28, 28), images),
            ("labels-idx1", (count,), labels.tobytes()),
        ):
            header = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
            (tmp_path / "mnist" / f"{stem}-{kind}-ubyte").write_bytes(header + content)
    code = textwrap.dedent(
        """
        import sys
        from fedgma.data.files import idx, load
        from fedgma.data.files.registry import SPECS, FileFormat
        file_format = FileFormat(idx.finder((1,) * 10, "mnist"), (2,) * 10, (1,) * 10)
        SPECS["mnist"] = SPECS["mnist"]._replace(formats=(file_format,))
        for _ in range(3):
            data = load("mnist", folders=[sys.argv[1]])
            assert (data.train.x[:, 0, 0, 0] == data.train.y).all()
        """
    )
    start = [sys.executable, "-c", code, str(tmp_path)]
    racing = [subprocess.Popen(start, stderr=subprocess.PIPE, text=True) for _ in range(8)]
    assert [process.communicate()[1] for process in racing] == [""] * 8
    assert [path.name for path in (tmp_path / "cache" / "datasets").iterdir()] == ["mnist"]


@row(
    "D19",
    "paths with spaces, other alphabets, 255 bytes, `~`, a NUL",
    happens="used as they are, or refused",
    seen="`no file or folder ...`; exit code 2 or 3",
)
@pytest.mark.parametrize("name", ["a b", "日本語", "ü", "x" * 251, "-", "%s{0}", "a\nb", "'\"", "[red]", "=1"])
def test_d19_odd_names_are_names(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    npz_file(tmp_path / f"{name}.npz", x=np.tile(IMAGES, (5, 1, 1)), y=np.arange(20) % 2)
    assert load(str(tmp_path / f"{name}.npz")).name == name
    (tmp_path / "s.toml").write_text(f"dataset = {json.dumps(f'./{name}.npz', ensure_ascii=False)}", encoding="utf-8")
    words = ["seed=0", "model=logistic", "partition.name=iid", "partition.clients=2"]
    code, printed, said = call("sweep", "s.toml", *words, "--status", "--json")
    assert code == 0, said
    assert len(json.loads(printed)["runs"]) == 2


@row("D19")
@pytest.mark.parametrize(
    "path",
    ["~no-such-user/x.npz", "a\0b.npz", "x" * 256 + ".npz", "/" + "y/" * 3000 + ".npz", "", "/dev/null", "no/where"],
)
def test_d19_names_that_no_file_has_are_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedgmaError):
        load(path)
    with pytest.raises(DataError, match="does not exist or cannot be read"):
        load("mnist", folders=[path or "nowhere"])
    (tmp_path / "s.toml").write_text(f"dataset = {json.dumps(path)}")
    code, _, said = call("sweep", "s.toml", "seed=0", "--status")
    assert code == 2, said
    assert len(said.splitlines()) == 1


@row("D19")
@pytest.mark.parametrize(
    "words", [("report",), ("convert",), ("compare", "gma"), ("sweep", "seed=0", "--status", "--out")]
)
def test_d19_a_folder_whose_name_is_too_long_is_one_sentence(words):
    code, _, said = call(*words, "x" * 400)
    assert code in (2, 3)
    assert len(said.splitlines()) == 1


@row("D19")
def test_d19_a_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    npz_file(tmp_path / "mine.npz", x=IMAGES, y=np.arange(4) % 2)
    assert load("~/mine.npz").name == "mine"
