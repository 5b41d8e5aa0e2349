"""Write the bill of materials of an environment in CycloneDX: packages, versions, licences, and who needs what.

make sbom
python tools/sbom.py build/release dist/sbom.json
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def main(environment: str, target: Path) -> int:
    """Write the file; 1 if a package states no licence."""
    target.parent.mkdir(exist_ok=True)
    command = ["-m", "cyclonedx_py", "environment", "--pyproject", "pyproject.toml", "--output-reproducible"]
    command += ["--of", "JSON", "-o", str(target), f"{environment}/bin/python"]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    packages = json.loads(target.read_text())["components"]
    silent = [package["name"] for package in packages if not licences(package)]
    print(f"{target}: {len(packages)} packages; without a stated licence: {', '.join(silent) or 'none'}")
    return 1 if silent else 0


def licences(package: dict[str, Any]) -> list[str]:
    """The licences that a package states: identifiers, names or one expression.

    >>> licences({"licenses": [{"license": {"id": "MIT"}}, {"expression": "Apache-2.0 OR MIT"}]})
    ['MIT', 'Apache-2.0 OR MIT']
    """
    rows = package.get("licenses", [])
    return [row.get("expression") or row["license"].get("id") or row["license"].get("name", "") for row in rows if row]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
