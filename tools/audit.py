"""Audit the source with bandit, and the packages of an environment with pip and pip-audit.

    make audit
    python tools/audit.py build/release

Findings in the source, packages that do not fit each other and known vulnerabilities are errors (exit code 1). The
advisories come from the internet. Packages that could not be looked up are listed, and nothing is said about them.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def main(environment: str) -> int:
    """Run all checks; 1 if one of them finds something."""
    results = [check_source(), check_fit(environment), check_advisories(environment)]
    return 0 if all(results) else 1


def check_source() -> bool:
    """Run bandit over the source, with its settings in pyproject.toml."""
    command = ["-m", "bandit", "-q", "-r", "src", "-c", "pyproject.toml"]
    clean = subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode == 0
    print(f"bandit: {'no findings in src' if clean else 'see the findings above'}")
    return clean


def check_fit(environment: str) -> bool:
    """Whether the packages have the dependencies that they ask for."""
    fits = subprocess.run([*pip(environment), "check"], cwd=ROOT, check=False).returncode == 0
    return fits


def pip(environment: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", environment]


def check_advisories(environment: str) -> bool:
    """Look up every package; False if one has a known vulnerability."""
    packages = installed(environment)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write("".join(f"{name}=={version}\n" for name, version in packages.items()))
        listed.flush()
        command = ["-m", "pip_audit", "-r", listed.name, "--no-deps", "--disable-pip", "-f", "json", "--timeout", "30"]
        done = subprocess.run(
            [sys.executable, *command, "--progress-spinner", "off"], capture_output=True, text=True, check=False
        )
    try:
        rows = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        rows = []
    print(advisories(rows, list(packages), done.stderr), end="")
    return not any(row.get("vulns") for row in rows)


def installed(environment: str) -> dict[str, str]:
    """Names and versions, without fedgma, and without a build's own mark (`+cpu`), which no advisory names."""
    listed = subprocess.run([*pip(environment), "list", "--format", "json"], capture_output=True, check=True).stdout
    versions = {row["name"]: row["version"].partition("+")[0] for row in json.loads(listed)}
    return {name: version for name, version in versions.items() if name not in ("fedgma", "pip", "setuptools")}


def advisories(rows: list[dict[str, Any]], packages: list[str], said: str) -> str:
    """What is known, and what is not."""
    checked = {row["name"].lower() for row in rows if "skip_reason" not in row}
    bad = [row for row in rows if row.get("vulns")]
    lines = [f"pip-audit: {len(checked)} of {len(packages)} packages looked up, {len(bad)} of them with known"]
    lines[0] += " vulnerabilities"
    for row in bad:
        ids = ", ".join(vulnerability["id"] for vulnerability in row["vulns"])
        lines.append(f"pip-audit: {row['name']} {row['version']}: {ids}")
    if missing := [name for name in packages if name.lower() not in checked]:
        lines.append(
            f"pip-audit: NOT CHECKED, the advisory service gave no answer for {len(missing)} packages:"
            f" {', '.join(missing)}"
        )
    if not rows and said.strip():
        lines.append(f"pip-audit: {said.strip().splitlines()[-1][:300]}")
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
