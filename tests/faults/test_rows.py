"""The page of faults: every row of the matrix has a test or a reason, and the page says what the tests do."""

from pathlib import Path

import pytest

from scripts import load_script

ROOT = Path(__file__).parents[2]
MATRIX = {"A": 31, "B": 12, "C": 22, "D": 20, "E": 7, "F": 20, "G": 12}


@pytest.fixture(scope="module")
def writer():
    for package in ("flwr", "torch"):
        pytest.importorskip(package)
    module = load_script("tools/write_faults.py")
    module.tables()  # imports every test of a fault
    return module


def test_every_fault_of_the_matrix_has_a_test_or_a_reason(writer):
    from rows import ROWS, TESTS

    wanted = {f"{letter}{number}" for letter, last in MATRIX.items() for number in range(1, last + 1)}
    assert set(ROWS) == wanted
    for number, row in ROWS.items():
        assert bool(row.why_not) != bool(TESTS.get(number)), number
        assert row.fault, number
        assert row.why_not or row.happens, number


def test_the_page_of_faults_is_what_the_tests_say(writer):
    page = (ROOT / "docs" / "faults.md").read_text()
    assert writer.page(page) == page, "run tools/write_faults.py"
