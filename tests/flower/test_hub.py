"""The example app in the form that Flower's hub takes, by the functions of `flwr app publish` and `flwr build`."""

import importlib
import shutil
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedgma[flower]'")
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import get_fab_metadata
from flwr.supercore.fab_format_version import normalize_and_validate_fab_format

publish = importlib.import_module("flwr.cli.app_cmd.publish")  # the package shows its function under this name
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's use of pathspec


@pytest.fixture
def app(tmp_path):
    """A copy under the app's own name, as its README says."""
    return Path(shutil.copytree(ROOT / "examples" / "flower_app", tmp_path / "fmnist-gma"))


def test_the_hub_takes_the_app(app):
    config, warnings = publish.load_and_validate(app / "pyproject.toml", check_module=False)
    assert warnings == []
    assert normalize_and_validate_fab_format(config).fab_format_version == 1
    publish._validate_app_name(app.name, "folder")
    publish._validate_description(config["project"]["description"])
    files = publish._collect_file_paths(app)
    publish._validate_files(files)
    assert {"LICENSE", "README.md", "pyproject.toml", "server_app.py"} <= {file.name for file in files}


def test_it_is_built_with_its_licence(app):
    bundle = build_fab_from_disk(app)
    assert get_fab_metadata(bundle) == ("fedgma/fmnist-gma", "1.0.0")
    assert b"LICENSE" in bundle


def test_the_licence_is_that_of_the_repository():
    assert (ROOT / "examples" / "flower_app" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
