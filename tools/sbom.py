"""Write the bill of materials of an environment in CycloneDX: packages, versions, licences, and who needs what.

make sbom
python tools/sbom.py build/release dist/sbom.json
"""

import json
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(environment: Path, target: Path) -> int:
    """Write the file; 1 if a package states no licence at all."""
    target.parent.mkdir(exist_ok=True)
    command = ["-m", "cyclonedx_py", "environment", "--pyproject", "pyproject.toml", "--output-reproducible"]
    command += ["--of", "JSON", "-o", str(target), f"{environment}/bin/python"]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    bill = json.loads(target.read_text())
    texts = licence_texts(environment)
    for package in bill["components"]:
        if "licenses" not in package and (text := texts.get(package["name"].lower())):
            package["licenses"] = [{"license": {"name": text, "acknowledgement": "declared"}}]
    target.write_text(json.dumps(bill, indent=2))
    silent = [package["name"] for package in bill["components"] if "licenses" not in package]
    print(f"{target}: {len(bill['components'])} packages; without a stated licence: {', '.join(silent) or 'none'}")
    return 1 if silent else 0


def licence_texts(environment: Path) -> dict[str, str]:
    """Licences in words: some packages state theirs in no other form, and the generator leaves those out."""
    folders = [str(folder) for folder in environment.glob("lib/python*/site-packages")]
    found = {
        package.metadata["Name"].lower(): package.metadata.get("License") for package in distributions(path=folders)
    }
    return {name: text.splitlines()[0] for name, text in found.items() if text}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
