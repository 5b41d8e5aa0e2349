import csv
import io
import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgma.reports.report import make_report
from fedgma.reports.tables import Table, comma_separated, latex, markdown, slug, text
from fedgma.statistics.arms import Spread
from run_folders import write_duel, write_run

TABLE = Table(
    "t", "Accuracy", ("arm", "best"), (("mean_1 & 50%", Spread(74.1261, 0.5, 3)), ("GMA", Spread(75.0, None, 1)))
)


def test_markdown_escapes_what_would_be_markup():
    assert "| mean\\_1 & 50% | 74.13 ± 0.50 |" in markdown(TABLE)


def test_latex_escapes_what_would_be_commands():
    assert r"mean\_1 \& 50\% & 74.13 $\pm$ 0.50 \\" in latex(TABLE)
    assert latex(TABLE).startswith("\\begin{tabular}{lr}\n\\toprule")


def test_csv_keeps_every_digit_and_gives_the_deviation_a_column():
    assert comma_separated(TABLE) == "arm,best,best sd\nmean_1 & 50%,74.1261,0.5\nGMA,75.0,\n"


def test_a_terminal_gets_aligned_columns():
    assert text(TABLE).splitlines() == [
        "arm                   best",
        "mean_1 & 50%  74.13 ± 0.50",
        "GMA                  75.00",
    ]


words = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Zl", "Zp")), max_size=8)
harmless = words.filter(lambda word: not set(word) & set("=+-@＝＋－＠"))


@given(st.lists(st.tuples(harmless, st.floats(allow_nan=False)), min_size=1, max_size=5))
def test_csv_is_read_back_as_it_was_written(values):
    table = Table("t", "", ("name", "value"), tuple(values))
    read = list(csv.reader(io.StringIO(comma_separated(table), newline="")))[1:]
    assert [(name, float(value)) for name, value in read] == values


def test_numbers_of_numpy_are_written_as_numbers():
    assert comma_separated(Table("t", "", ("n", "m"), ((np.float64(0.1), np.int64(3)),))) == "n,m\n0.1,3\n"


def test_a_cell_that_a_spreadsheet_would_run_is_kept_a_text():
    assert "'=1+1" in comma_separated(Table("t", "", ("name",), (("=1+1",),)))


@given(st.text(max_size=200))
def test_a_name_made_of_any_text_is_a_plain_file_name(anything):
    name = slug(anything)
    assert 0 < len(name) <= 100
    assert not set(name) & set("/\\ \n\0")
    assert name not in (".", "..")


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX here; apt install texlive-latex-recommended")
def test_latex_is_taken_by_latex(tmp_path):
    (tmp_path / "t.tex").write_text(
        "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\n" + latex(TABLE) + "\\end{document}\n"
    )
    subprocess.run(["pdflatex", "-halt-on-error", "t.tex"], cwd=tmp_path, check=True, capture_output=True)


def test_a_rule_that_nobody_knows_is_listed_and_in_no_verdict(tmp_path):
    write_duel(tmp_path, seeds=4, rounds=40)
    for seed in range(4):
        write_run(tmp_path, seed=seed, aggregator="gmaa", rounds=40)
    made = make_report(tmp_path)
    assert [pair.names for pair in made.comparisons] == [("GMA", "the mean")]
    assert "gmaa" not in made.title + "".join(made.verdicts)
    assert "4 runs name an unknown rule (gmaa) and are in no verdict" in made.notes
    assert "gmaa" in [row[0] for row in made.tables[0].rows]
