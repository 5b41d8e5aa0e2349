"""Write the archive of the replication: exported runs, plans, printed numbers, versions, licence and checksums.

python tools/archive.py [FOLDER]     # dist/ by default; what is not committed is not in it

The same commit gives the same bytes: names are sorted, times are that of the commit, owners are left out.
"""

import gzip
import hashlib
import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

from fedgma.paper.entries import Entry, parse_export
from fedgma.paper.schema import runs_table
from fedgma.reports.tables import comma_separated

ROOT = Path(__file__).parents[1]
PLANS = "src/fedgma/paper/"
VERSION = "src/fedgma/__init__.py"
PATHS = ("results", PLANS, VERSION, "docs/replication.md", "docs/replication", "docs/paper.md", "docs/statistics.md")
PATHS += ("LICENSE", "CITATION.cff", "constraints.txt")
SUMS = "SHA256SUMS"


def git(root: Path, *words: str) -> bytes:
    """What a git command prints."""
    return subprocess.run(["git", "-C", str(root), *words], capture_output=True, check=True).stdout


def committed(root: Path) -> dict[str, bytes]:
    """The files of the last commit that belong to the archive, under their names in it."""
    known = git(root, "ls-tree", "-r", "--name-only", "HEAD", "--", *PATHS).decode().splitlines()
    wanted = [name for name in known if not name.startswith(PLANS) or name.endswith((".toml", ".csv"))]
    with tarfile.open(fileobj=io.BytesIO(git(root, "archive", "--format=tar", "HEAD", *wanted))) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}
    return {name.replace(PLANS, "plans/"): content for name, content in files.items()}


def contents(root: Path) -> dict[str, bytes]:
    """Everything in the archive: the committed files, all runs as one table, the version, and checksums."""
    files = committed(root)
    version = re.search(r'__version__ = "(.+)"', files.pop(VERSION).decode())[1]
    commit = git(root, "rev-parse", "HEAD").decode().strip()
    files["VERSION"] = f"fedgma {version}\ncommit {commit}\n".encode()
    files["runs.csv"] = comma_separated(runs_table(exported(files))).encode()
    sums = [f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files)]
    return {**files, SUMS: "".join(sums).encode()}


def exported(files: Mapping[str, bytes]) -> list[tuple[str, Entry]]:
    """All exported runs with the number of their experiment."""
    folders = [name.removesuffix("/runs.jsonl") for name in sorted(files) if name.endswith("/runs.jsonl")]
    read = {one: parse_export(files[f"{one}/runs.json"], files[f"{one}/runs.jsonl"], one) for one in folders}
    return [(folder.split("/")[-1], entry) for folder, entries in read.items() for entry in entries]


def packed(files: Mapping[str, bytes], folder: str, seconds: int) -> bytes:
    """A tar.gz of the files in one folder, with this time on all of them."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(files):
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size, member.mtime, member.mode = len(files[name]), seconds, 0o644
            tar.addfile(member, io.BytesIO(files[name]))
    return gzip.compress(out.getvalue(), mtime=0)


def write_archive(root: Path, out: Path) -> Path:
    """Write the archive of the last commit below `out`; return its path."""
    commit = git(root, "rev-parse", "--short=12", "HEAD").decode().strip()
    seconds = int(git(root, "log", "-1", "--format=%ct").decode())
    name = f"fedgma-replication-{commit}"
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.tar.gz"
    path.write_bytes(packed(contents(root), name, seconds))
    return path


if __name__ == "__main__":
    written = write_archive(ROOT, Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist")
    print(f"{written}: {written.stat().st_size / 1e6:.1f} MB")
    if git(ROOT, "status", "--porcelain", "--", *PATHS):
        print("changes that are not committed are not in it")
