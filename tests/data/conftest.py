import os
from pathlib import Path

import pytest
from data_files import write_idx_set

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No test reads or writes the user's cache or data folders."""
    monkeypatch.setenv("FEDGMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDGMA_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def real_folder():
    """The folder of packed real data sets: $FEDGMA_TEST_DATA, or shared/data beside the repository."""
    folder = Path(os.environ.get("FEDGMA_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "mnist.npz").is_file():
        pytest.skip("the packed data sets are not here (set FEDGMA_TEST_DATA to their folder)")
    return folder


@pytest.fixture(scope="session")
def real(real_folder, tmp_path_factory):
    """load(name) for real data sets, decoded once a session."""
    from fedgma.data.files import load
    from fedgma.data.files.registry import SPECS

    cache = tmp_path_factory.mktemp("real-cache")

    def get(name):
        if name == "fmnist" and not SPECS["fmnist"].system[0].is_dir():
            pytest.skip("Debian's dataset-fashion-mnist is not installed")
        return load(name, folders=[real_folder], cache=cache)

    return get


@pytest.fixture
def small_mnist(monkeypatch):
    """Lets `mnist` be a set of 2 training and 1 test image a class."""
    from fedgma.data.files import idx
    from fedgma.data.files.registry import SPECS, FileFormat

    train, test = (2,) * 10, (1,) * 10
    spec = SPECS["mnist"]._replace(formats=(FileFormat(idx.finder(test, "mnist"), train, test),))
    monkeypatch.setitem(SPECS, "mnist", spec)
    return lambda folder, end=".gz": write_idx_set(folder, [*range(10), *range(10)], range(10), end)
