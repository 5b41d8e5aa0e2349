"""The specification curve: the differences of all settings, sorted, above what each setting chose."""

import pytest

from fedgma.records.reader import read_runs
from fedgma.reports import pages
from fedgma.reports.pictures import make_pictures, specification_curve
from fedgma.reports.plots.specifications import MOST_CHOICES, Specification, draw_specifications, shown_choices
from fedgma.reports.report import make_report
from fedgma.statistics.baseline import against_baseline
from fedgma.statistics.verdicts import correct, paired
from run_folders import write_duel

LIFTS = {(clients, rate): lift for rate, lift in ((0.1, 8), (1.0, -8)) for clients in (10, 20, 30, 40, 50, 60)}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Twelve settings: GMA is ahead with one rate and behind with the other."""
    out = tmp_path_factory.mktemp("runs")
    for (clients, rate), lift in LIFTS.items():
        part = {"clients": clients}
        write_duel(out, seeds=4, lift=lift, rounds=2, dataset="t.npz", partition=part, server_learning_rate=rate)
    return out


def test_a_report_of_more_than_ten_settings_has_a_specification_curve(sweep, tmp_path, monkeypatch):
    drawn = []

    def without_the_others(rows, comparisons):
        drawn.extend(make_pictures((), comparisons))
        return drawn

    monkeypatch.setattr(pages, "make_pictures", without_the_others)
    pages.write_report(make_report([sweep]), tmp_path)
    (picture,) = drawn
    assert (tmp_path / "pictures" / f"{picture.name}.png").exists()
    assert picture.kind == "Specification curve"
    assert "How far GMA is ahead of the mean in 12 settings" in picture.caption
    assert "for 12 tests GMA is ahead in 6 and behind in 6" in picture.caption


def test_a_report_of_ten_settings_has_none(sweep):
    made = make_report([sweep], where="partition.clients=10,20,30,40,50")
    assert len(made.comparisons[0].cells) == 10
    assert make_pictures((), made.comparisons) == []


def test_differences_rise_and_the_matrix_shows_what_each_setting_chose(sweep):
    (comparison,) = against_baseline(read_runs([sweep]))
    curve, matrix = specification_curve(comparison).figure.axes
    dots = [line for line in curve.get_lines() if line.get_marker() == "o"]
    drawn = dict(sorted((x, y) for line in dots for x, y in zip(*line.get_data(), strict=True)))
    assert list(drawn.values()) == sorted(cell.verdict.mean for cell in comparison.cells)
    labels = [tick.get_text() for tick in matrix.get_yticklabels()]
    assert "server learning rate  0.1" in labels
    row = labels.index("server learning rate  0.1")
    marks = next(line for line in matrix.get_lines() if line.get_marker() == "|").get_data()
    assert sorted(x for x, y in zip(*marks, strict=True) if y == row) == [6, 7, 8, 9, 10, 11]  # where GMA is ahead


def test_settings_with_too_many_values_are_left_out_of_the_matrix():
    verdicts = correct([paired([float(place), place + 1.0]) for place in range(MOST_CHOICES)])
    cells = [Specification({"a": str(n % 2), "b": str(n)}, verdict) for n, verdict in enumerate(verdicts)]
    assert shown_choices(cells) == [("a", "0"), ("a", "1")]
    assert draw_specifications(cells).axes


def test_one_seed_has_no_interval_and_is_drawn():
    cells = [Specification({"a": str(place)}, paired([float(place)])) for place in range(3)]
    assert len(draw_specifications(cells).axes[0].get_lines()) == 2  # the dots and the line at zero
