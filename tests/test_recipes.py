"""What the documentation prints for other frameworks is what the programs in examples/recipes run."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*_masked.py"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_documentation_prints_the_recipe_that_runs(path):
    recipe = path.read_text().split("# recipe\n")[1].split("# end of the recipe")[0].strip()
    assert recipe in (ROOT / "docs" / "other_frameworks.md").read_text()


def test_there_are_three():
    assert [path.stem for path in RECIPES] == ["fedjax_masked", "fedlab_masked", "fluke_masked"]
