"""Make a release: the version in all its places, sdist and wheel, and a check of both without a network.

    make release VERSION=0.2.0      # writes the version, builds, checks, and writes the bill of materials
    make release                    # builds and checks the version that the files have
    python tools/release.py dist build/release 0.2.0

Run it with a Python that has build, hatchling and numpy. The second folder is an environment with the extras, in which
the wheel is installed and its commands are tried. It commits and uploads nothing.
"""

import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE, CITATION, CHANGELOG = "src/fedgma/__init__.py", "CITATION.cff", "CHANGELOG.md"
VERSION = re.compile(r'(?m)^(__version__ = "|version: )([^"\n]+)')
PIP = (sys.executable, "-m", "pip", "--python")
OFFLINE = """
import socket
def refuse(*arguments): raise OSError("a release must not need a network")
socket.socket.connect = socket.getaddrinfo = refuse
"""
TRIAL = f"""{OFFLINE}
import sys, numpy as np, fedgma
assert fedgma.__version__ == sys.argv[1], fedgma.__version__
updates = {{"w": np.array([[3.0, 3.0], [3.0, 3.0], [3.0, -3.0]])}}
step = fedgma.masked_mean(tau=0.5)(updates, [10, 10, 10]).update["w"].round(3).tolist()
assert step == [3.0, 0.333], step
extras = {{"torch", "scipy", "pydantic", "flwr"}} & set(sys.modules)
assert not extras, extras
"""
COMMAND = f"""{OFFLINE}
from fedgma.cli import main
main()
"""
COMMANDS = ("--version", "run rounds=2 client_test_size=0 --quiet", "report runs --quiet", "ls")


def main(out: Path, environment: Path, version: str | None = None) -> None:
    """Write the version if one is given; build and check."""
    if version is not None:
        write_version(ROOT, version, datetime.date.today().isoformat())
    version = version_of((ROOT / SOURCE).read_text())
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)  # the wheel is built from the sdist
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    check_files(wheel)
    with tempfile.TemporaryDirectory() as folder:
        check_install(wheel, version, Path(folder, "plain"))
        check_commands(wheel, environment, Path(folder))
    for file in (sdist, wheel):
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1e6:.1f} MB, version {version}, checked")


def version_of(text: str) -> str:
    """The version that a file states.

    >>> version_of('__version__ = "0.1.0"')
    '0.1.0'
    """
    match = VERSION.search(text)
    assert match is not None, "a file has lost its version"
    return match[2]


def write_version(root: Path, version: str, date: str) -> None:
    """Write the version and its date into the package, the citation and the changelog; all three or none."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise SystemExit(f"VERSION must be of the form 1.2.3 or 1.2.3rc1, got {version!r}")
    changed = {
        SOURCE: VERSION.sub(rf"\g<1>{version}", (root / SOURCE).read_text()),
        CITATION: dated(VERSION.sub(rf"\g<1>{version}", (root / CITATION).read_text()), date),
        CHANGELOG: with_release((root / CHANGELOG).read_text(), version, date),
    }
    for name, text in changed.items():
        (root / name).write_text(text)


def dated(citation: str, date: str) -> str:
    """A citation with the date of its release, below its version."""
    without = re.sub(r"(?m)^date-released: .*\n", "", citation)
    return re.sub(r"(?m)^version: .*\n", rf"\g<0>date-released: {date}\n", without)


def with_release(changelog: str, version: str, date: str) -> str:
    """The changelog in which what was unreleased is this version, below an empty heading for what comes next."""
    if f"## {version} " in changelog:
        raise SystemExit(f"the changelog has version {version} already; choose the next one")
    before, heading, after = changelog.partition("\n## Unreleased\n")
    if not heading or after.lstrip().startswith("## ") or not after.strip():
        raise SystemExit("the changelog has nothing under `## Unreleased`; write what changes for users there")
    return f"{before}{heading}\n## {version} - {date}\n{after}"


def check_files(wheel: Path) -> None:
    """The wheel holds every tracked file of the package, and nothing else."""
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    expected = {name.removeprefix("src/") for name in tracked.split() if (ROOT / name).exists()}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
    if held != expected:
        raise SystemExit(f"{wheel.name} differs from the tracked files: {sorted(held ^ expected)[:5]}")


def check_install(wheel: Path, version: str, folder: Path) -> None:
    """Install without an index and without dependencies; import and average beside numpy alone."""
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    python = folder / "bin" / "python"
    run(*PIP, python, "install", "--quiet", "--no-index", "--no-deps", wheel)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in ("numpy", "numpy.libs"):  # the one dependency, from the environment that runs this
        if (there := library() / name).exists():
            (packages / name).symlink_to(there)
    run(python, "-I", "-c", TRIAL, version)


def check_commands(wheel: Path, environment: Path, folder: Path) -> None:
    """Install beside the extras; train, compare, and list the runs."""
    run(*PIP, environment, "install", "--quiet", "--no-index", "--no-deps", "--force-reinstall", wheel)
    for command in COMMANDS:
        run(environment / "bin" / "python", "-I", "-c", COMMAND, *command.split(), cwd=folder)


def library() -> Path:
    """The folder of packages that has numpy."""
    numpy = find_spec("numpy")
    assert numpy is not None, "this Python has no numpy"
    return Path(str(numpy.origin)).parents[1]


def run(*command: object, cwd: Path = ROOT) -> None:
    subprocess.run(list(map(str, command)), check=True, cwd=cwd)


if __name__ == "__main__":
    main(ROOT / sys.argv[1], ROOT / sys.argv[2], *sys.argv[3:])
