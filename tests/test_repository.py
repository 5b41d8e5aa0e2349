"""What surrounds the package: the version in all its places, the release recipe, the checks that others run."""

import re
import tomllib
from pathlib import Path

import pytest

import fedgma
from scripts import load_script

ROOT = Path(__file__).parents[1]
PLACES = ("src/fedgma/__init__.py", "CITATION.cff", "CHANGELOG.md")
NEWS = "# Changelog\n\n## Unreleased\n\n- y\n\n## 1.0.0 - 2030-01-01\n\n- x\n"


@pytest.fixture
def release():
    return load_script("tools/release.py")


@pytest.fixture
def copy(tmp_path):
    """The files that state a version, to be written to."""
    for name in PLACES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "CHANGELOG.md").write_text(NEWS)
    return tmp_path


def test_the_citation_states_the_version_of_the_package(release):
    assert release.version_of((ROOT / "CITATION.cff").read_text()) == fedgma.__version__


def test_a_release_writes_its_version_in_every_place(release, copy):
    release.write_version(copy, "7.8.9", "2030-01-02")
    package, citation, changelog = ((copy / name).read_text() for name in PLACES)
    assert '__version__ = "7.8.9"' in package
    assert "\nversion: 7.8.9\ndate-released: 2030-01-02\n" in citation
    assert "cff-version: 1.2.0" in citation
    assert "## Unreleased\n\n## 7.8.9 - 2030-01-02\n\n- y\n" in changelog
    assert changelog.replace("\n## 7.8.9 - 2030-01-02\n", "", 1) == NEWS


def test_the_next_release_replaces_the_date(release):
    first = release.dated("version: 1.0.0\nlicense: x\n", "2030-01-02")
    assert release.dated(first, "2031-01-02") == "version: 1.0.0\ndate-released: 2031-01-02\nlicense: x\n"


@pytest.mark.parametrize(
    ("changelog", "version", "message"),
    [
        ("# Changelog\n\n## Unreleased\n\n## 1.0.0 - 2030\n\n- x\n", "1.1.0", "nothing under"),
        (NEWS, "1.0.0", "already"),
        ("# Changelog\n\n## 1.0.0 - 2030\n\n- x\n", "1.1.0", "nothing under"),
    ],
)
def test_a_release_without_news_or_twice_is_refused(release, changelog, version, message):
    with pytest.raises(SystemExit, match=message):
        release.with_release(changelog, version, "2031-01-02")


def test_a_version_that_is_none_changes_no_file(release, copy):
    with pytest.raises(SystemExit, match="VERSION must be"):
        release.write_version(copy, "next", "2030-01-02")
    assert (copy / PLACES[0]).read_text() == (ROOT / PLACES[0]).read_text()


def test_the_workflow_runs_make_test_on_every_supported_python():
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert "- run: make test\n" in workflow
    lowest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    versions = re.search(r"python: \[(.*)\]", workflow)[1].replace('"', "").split(", ")
    assert versions == [lowest, "3.12", "3.13", "3.14"]
    assert "os: [ubuntu-latest, macos-latest]" in workflow


def test_the_hooks_before_a_commit_are_checks_of_make_test():
    hooks = re.findall(r"entry: \.venv/bin/(.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    makefile = (ROOT / "Makefile").read_text()
    assert hooks == ["ruff format", "ruff check", "mypy"]
    assert all(f"$(BIN)/{hook}" in makefile for hook in hooks)


def test_no_file_holds_what_a_merge_left_behind():
    places = ("*.*", "docs/**/*.md", "examples/**/*.*", "src/**/*.py", "src/**/*.toml", "tests/**/*.py", "tools/**/*.*")
    files = {file for place in places for file in ROOT.glob(place) if file.is_file()}
    left = re.compile(rb"^(<<<<<<<|>>>>>>>) ", re.MULTILINE)
    assert len(files) > 400
    assert [file.name for file in files if left.search(file.read_bytes())] == []
