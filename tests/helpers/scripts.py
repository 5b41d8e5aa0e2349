"""Programs of the repository that are not part of the package, as modules."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load_script(path):
    """The module in a file, given from the root of the repository, such as "tools/write_settings.py"."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
