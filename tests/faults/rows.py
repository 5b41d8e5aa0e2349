"""The rows of docs/faults.md: each test of a fault names its row, what happens and what the user sees.

    @row("A1", "NaN in one update", happens="the update is refused; ...", seen="`nonfinite` beside the client's name")
    def test_a1_nan_costs_the_client(): ...

    does_not_apply("F17", "the server's object store fills the disk", why="...")

A row may have several tests: the first one describes it, the others give the number alone, `@row("A1")`.
`tools/write_faults.py` writes the page from the rows.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

Test = TypeVar("Test", bound=Callable[..., object])


class Row(NamedTuple):
    """One fault: what happens, and what the user sees; for a fault that does not apply, why not."""

    number: str
    fault: str
    happens: str = ""
    seen: str = ""
    why_not: str = ""


ROWS: dict[str, Row] = {}  # by number, in the order of the modules
TESTS: dict[str, list[str]] = {}  # names of the tests of each row


def row(number: str, fault: str = "", *, happens: str = "", seen: str = "") -> Callable[[Test], Test]:
    """Mark a test as one of a row; the first test describes the row."""
    if fault:
        assert number not in ROWS, f"row {number} is described twice"
        ROWS[number] = Row(number, fault, happens, seen)
    TESTS.setdefault(number, [])

    def mark(test: Test) -> Test:
        TESTS[number].append(f"{test.__module__}::{test.__name__}")
        return test

    return mark


def does_not_apply(number: str, fault: str, *, why: str) -> None:
    """List a row that has no test, with the reason."""
    assert number not in ROWS, f"row {number} is described twice"
    ROWS[number] = Row(number, fault, why_not=why)
