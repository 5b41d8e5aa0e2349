"""The replication: its pages say what the exported runs say, in few words, and its building blocks are right."""

import re

import pytest

from fedgma.paper import overview
from fedgma.paper.catalogue import Claim, asks_again, catalogue
from fedgma.paper.claims import Answer
from fedgma.paper.findings import ClaimVerdict
from fedgma.paper.kinds import Look
from fedgma.paper.plots.forest import LOOKS, draw_forest
from fedgma.statistics.verdicts import paired
from scripts import load_script

TESTED, UNSURE = paired([1.0, 1.2, 1.6, 1.0]), paired([1.0, -1.2, 1.6, 1.0])


@pytest.fixture(scope="module")
def tool():
    return load_script("tools/write_replication.py")


@pytest.fixture(scope="module")
def found(tool):
    return tool.read()


def test_the_pages_say_what_the_exported_runs_say(tool, found):
    pages = tool.pages(found)
    for path, text in pages.items():
        assert path.read_text() == text, f"{path.name}: run: python tools/write_replication.py --page"
    known = {path.name for path in pages} | {"discussion.md", "replication.md"}
    assert {path.name for path in (tool.DOCS / "replication").iterdir()} <= known


def test_the_page_is_short_and_has_one_line_for_each_claim_of_the_paper(tool, found):
    page = (tool.DOCS / "replication.md").read_text()
    assert len(page.split()) <= 1500
    rows = re.findall(r"^\| \[(\w+)\]", page, flags=re.MULTILINE)
    again = {name for name, one in catalogue().items() if asks_again(one) and (tool.RESULTS / name).is_dir()}
    claims = [name for name, listed in found.answers.items() for _ in listed if name[0] == "E" or name in again]
    assert sorted(rows) == sorted(claims)


def test_the_picture_has_every_difference_with_an_interval(found):
    rows = overview.differences(found.answers)
    assert {row.surety for row in rows} <= set(LOOKS)
    labels = [row.label for row in rows]
    assert "C6 at convergence, label skew" in labels
    assert sum(label.startswith("C35 ") for label in labels) == 4  # as E7 has
    assert len(set(labels)) == len(labels)
    printed_too = next(row for row in rows if row.label == "E8 without client momentum")
    assert (printed_too.surety, printed_too.printed < 0) == ("decided", True)  # significant, as in print
    axes = draw_forest(rows).axes[0]
    drawn = [label.get_text() for label in axes.get_yticklabels()]
    assert sorted(drawn) == sorted(labels)
    claimed = [row.label for row in rows if row.claimed]
    assert drawn[: len(claimed)] == claimed


def test_levels_count_cells_near_and_above_print(found):
    levels = overview.levels_of(found.comparisons["C6"])
    distances = [overview.from_print(one, found.comparisons["C6"].experiment) for one in found.comparisons["C6"].on()]
    assert levels.near == sum(abs(one) <= 2 for one in distances)
    assert levels.above == sum(one > 2 for one in distances)
    assert (levels.run, levels.printed) == (32, 32)


@pytest.mark.parametrize(
    ("look", "reason"),
    [
        (Look("no cell has converged; ", paired([1.0, 2.0]), fixed=ClaimVerdict.PRELIMINARY), "not converged, 2 seeds"),
        (Look("not converged; best at 1", fixed=ClaimVerdict.PRELIMINARY), "not converged"),
        (Look("no two values", after=", 1 seed", fixed=ClaimVerdict.PRELIMINARY), "one seed"),
        (Look("", TESTED, TESTED._replace(corrected=0.2, tests=9)), "not significant after the correction"),
        (Look("", UNSURE, UNSURE), "over converged and printed cells, by the last ten rounds"),
    ],
)
def test_a_verdict_that_is_not_decided_has_a_reason(look, reason):
    assert overview.reason(Answer(Claim("it helps"), {"": look})) == reason


def test_a_claim_of_which_a_part_holds_does_not_hold():
    held, unsure, early = (Look("", one, one) for one in (TESTED, UNSURE, paired([1.0, 2.0])))
    assert overview.brief(Answer(Claim("a and b"), {"a": held, "b": held})) == "holds"
    assert overview.brief(Answer(Claim("a and b"), {"a": held, "b": unsure})) == "partly holds, partly inconclusive"
    assert overview.brief(Answer(Claim("a and b"), {"a": unsure, "b": early})) == "inconclusive (partly preliminary)"


def test_every_claim_has_a_short_name(found):
    shorts = [(name, answer.claim.short) for name, listed in found.answers.items() for answer in listed]
    assert all(short for _, short in shorts)
    assert len(set(shorts)) == len(shorts)
