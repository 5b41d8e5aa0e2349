"""What is exported can be read by a stranger: every field is described, and the archive is complete and repeatable."""

import csv
import hashlib
import io
import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from made_runs import write_experiment

import fedgma
from fedgma.paper import schema
from fedgma.paper.catalogue import experiment
from fedgma.paper.entries import read_entries, write_export
from fedgma.paper.plans import Cut
from scripts import load_script

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


def test_the_readme_of_the_results_is_up_to_date():
    tool = load_script("tools/write_schema.py")
    assert tool.PAGE.read_text() == tool.page(), "run: python tools/write_schema.py"


def test_every_field_of_the_exported_files_is_described():
    for file in RESULTS.glob("*/runs.json"):
        shared = json.loads(file.read_text())
        assert set(shared) <= set(schema.SHARED)
        assert all(set(one) <= set(schema.CIRCUMSTANCES) for one in shared["circumstances"])
        line = json.loads((file.parent / "runs.jsonl").read_text().split("\n", 1)[0])
        assert set(line) <= set(schema.LINE)
        assert set(line["facts"]) <= set(schema.FACTS)
        assert set(line["scores"]) <= set(schema.SPLITS)
        assert all(len(values) == len(shared["columns"]["scores"]) for values in line["scores"].values())
        assert all(len(values) == len(shared["columns"]["curves"]) for values in line["curves"].values())


@pytest.fixture
def repository(tmp_path):
    """A small repository with two exported runs; its commit does not depend on the clock."""
    root = tmp_path / "repository"
    write_experiment(tmp_path / "runs", experiment("E10"), lambda run: 80.0, cut=Cut(seeds=1, cells="clients=10"))
    write_export(read_entries([tmp_path / "runs"])[0], root / "results" / "E10")
    plans = root / "src" / "fedgma" / "paper" / "experiments"
    plans.mkdir(parents=True)
    texts = {"LICENSE": "a licence", "src/fedgma/__init__.py": '__version__ = "1.2.3"\n'}
    texts |= {"src/fedgma/paper/experiments/e10.toml": "title = 1", "src/fedgma/paper/plans.py": "", "other.txt": ""}
    for name, text in texts.items():
        (root / name).write_text(text)
    who = {"GIT_AUTHOR_DATE": "1700000000 +0000", "GIT_COMMITTER_DATE": "1700000000 +0000"}
    who |= {f"GIT_{role}_{what}": "a@b" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "runs", "--no-gpg-sign"]):
        subprocess.run(["git", "-C", str(root), *words], check=True, env={**os.environ, **who})
    return root


def test_the_archive_has_runs_plans_licence_version_and_checksums_in_the_same_bytes_every_time(repository, tmp_path):
    tool = load_script("tools/archive.py")
    path = tool.write_archive(repository, tmp_path / "one")
    (repository / "results" / "E10" / "runs.json").touch()
    (repository / "results" / "more.txt").write_text("not committed")
    assert tool.write_archive(repository, tmp_path / "two").read_bytes() == path.read_bytes()
    with tarfile.open(path) as tar:
        files = {name.partition("/")[2]: tar.extractfile(name).read() for name in tar.getnames()}
        assert {(member.mtime, member.uid, member.uname) for member in tar} == {(1700000000, 0, "")}
    inside = {"LICENSE", "VERSION", "SHA256SUMS", "runs.csv", "plans/experiments/e10.toml"}
    assert set(files) == inside | {"results/E10/runs.json", "results/E10/runs.jsonl"}
    assert files["VERSION"].startswith(b"fedgma 1.2.3\ncommit ")
    sums = dict(reversed(line.split("  ")) for line in files["SHA256SUMS"].decode().splitlines())
    assert sums == {n: hashlib.sha256(files[n]).hexdigest() for n in files if n != "SHA256SUMS"}
    rows = list(csv.DictReader(io.StringIO(files["runs.csv"].decode())))
    assert {row["aggregator"] for row in rows} == {"mean", "gma"}
    assert {row["experiment"] for row in rows} == {"E10"}
    assert all(float(row["test_last10_percent"]) == pytest.approx(80.0) for row in rows)
    assert set(schema.COLUMNS) <= set(rows[0])


def test_the_citation_names_the_version_and_the_licence():
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {fedgma.__version__}\n" in text
    assert "\nlicense: Apache-2.0\n" in text
