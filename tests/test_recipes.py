"""What the documentation prints for other frameworks is what the programs in examples/recipes run."""

import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts import load_script

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*_masked.py"))
PACKAGES = ("fedjax", "fedlab", "fluke", "mergekit", "peft", "torchft")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_documentation_prints_the_recipe_that_runs(path):
    recipe = path.read_text().split("# recipe\n")[1].split("# end of the recipe")[0].strip()
    assert recipe in (ROOT / "docs" / "other_frameworks.md").read_text()


def test_these_are_the_recipes():
    assert [path.stem for path in RECIPES] == sorted(f"{name}_masked" for name in (*PACKAGES, "diloco"))


def run(recipe, **environment):
    command = [sys.executable, ROOT / "examples" / "recipes" / f"{recipe}_masked.py"]
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_recipe_equals_the_masked_mean(package):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    process = run(package)
    printed, _ = process.communicate()
    assert process.returncode == 0
    assert "equal to" in printed.splitlines()[-1]


class Exchange:
    """Stands for torch.distributed among threads: an all-reduce that waits for every worker."""

    def __init__(self, workers):
        self.workers, self.sums, self.ready = workers, [], threading.Barrier(workers, timeout=600)

    def get_world_size(self):
        return self.workers

    def all_reduce(self, tensor, async_op):
        self.sums.append(tensor.clone())
        self.ready.wait()
        total = sum(self.sums[1:], self.sums[0])
        self.ready.wait()
        tensor.copy_(total)
        if self.ready.wait() == 0:
            self.sums.clear()
        self.ready.wait()
        return self

    def wait(self):
        """It is done already."""


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_that_vote_by_all_reduce_equal_the_masked_mean(workers, monkeypatch):
    torch = pytest.importorskip("torch")
    diloco = load_script("examples/recipes/diloco_masked.py")
    monkeypatch.setattr(diloco, "dist", Exchange(workers))
    ready, models = threading.Lock(), {}
    network = diloco.network

    def one_at_a_time():
        with ready:  # its seed is torch's global one
            return network()

    monkeypatch.setattr(diloco, "network", one_at_a_time)
    expected = diloco.alone(workers)
    threads = [threading.Thread(target=lambda k=k: models.update({k: diloco.together(k)})) for k in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(models) == workers
    for name, value in expected.items():
        torch.testing.assert_close(models[0][name], value)
        assert torch.equal(models[0][name], models[workers - 1][name])


@pytest.mark.slow
def test_the_same_with_gloo_on_two_processes(tmp_path):
    pytest.importorskip("torch")
    shared = {"WORLD_SIZE": "2", "INIT_METHOD": (tmp_path / "store").as_uri(), "OMP_NUM_THREADS": "1"}
    workers = [run("diloco", RANK=rank, **shared) for rank in ("0", "1")]
    printed = [worker.communicate()[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert printed == ["DiLoCo: 2 rounds of 2 workers, equal to fedgma.masked_mean\n", ""]
