"""The notebooks in examples run from the first cell to the last, at a small size, and are kept small."""

import json
from pathlib import Path

import pytest

from scripts import load_script

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path, tmp_path, monkeypatch):
    pytest.importorskip("pydantic", reason="the simulator is not installed: pip install 'fedgma[sim]'")
    monkeypatch.chdir(tmp_path)
    names = load_script("tools/notebooks.py").run(json.loads(path.read_text()), ROUNDS=2, SEEDS=[0])
    assert len(names["outcome"].runs) == len(names["outcome"].arms) >= 2
    assert "preliminary" in names["outcome"].verdicts[0].lower()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_is_whole_and_small(path):
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert path.stat().st_size < 20_000


def test_a_cell_gives_what_it_prints_and_its_last_value():
    notebooks = load_script("tools/notebooks.py")
    cell = {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": ["N = 2\n", "print(N)\n", "N + 1"]}
    after = {"cell_type": "code", "metadata": {}, "source": ["N;"]}
    names = notebooks.run({"cells": [cell, after]}, N=5)
    assert names["N"] == 5
    printed, value = cell["outputs"]
    assert (printed["text"], value["data"]) == (["2\n"], {"text/plain": ["3"]})
    assert after["outputs"] == []
    with pytest.raises(ValueError, match="no parameter M"):
        notebooks.run({"cells": [cell]}, M=1)
