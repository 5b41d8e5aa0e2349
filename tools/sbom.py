"""Write the bill of materials of an environment in CycloneDX: packages, versions, licences, and who needs what.

make sbom
python tools/sbom.py build/release dist/sbom.json
"""

import json
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(environment: Path, target: Path) -> int:
    """Write the file; 1 if a package states no licence at all."""
    target.parent.mkdir(exist_ok=True)
    command = ["-m", "cyclonedx_py", "environment", "--pyproject", "pyproject.toml", "--output-reproducible"]
    command += ["--of", "JSON", "-o", str(target), f"{environment}/bin/python"]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    bill = json.loads(target.read_text())
    listed = packages(environment)
    bill["metadata"]["component"]["version"] = listed["fedgma"].version  # its place in pyproject.toml is a file's name
    texts = {name: text.splitlines()[0] for name, one in listed.items() if (text := one.metadata.get("License"))}
    for package in bill["components"]:
        if "licenses" not in package and (text := texts.get(package["name"].lower())):
            package["licenses"] = [{"license": {"name": text, "acknowledgement": "declared"}}]
    target.write_text(json.dumps(bill, indent=2))
    silent = [package["name"] for package in bill["components"] if "licenses" not in package]
    print(f"{target}: {len(bill['components'])} packages; without a stated licence: {', '.join(silent) or 'none'}")
    return 1 if silent else 0


def packages(environment: Path) -> dict[str, Distribution]:
    """What is installed, by name. Some packages state their licence in words alone, which the generator leaves out."""
    folders = [str(folder) for folder in environment.glob("lib/python*/site-packages")]
    return {package.metadata["Name"].lower(): package for package in distributions(path=folders)}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
