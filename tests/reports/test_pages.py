import base64
import hashlib
import io
import json
import re
from html import escape, unescape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from browser import needs_browser
from fedgma.experiments.play import run
from fedgma.records.reader import read_runs
from fedgma.reports.pages import _verdict, page, write_report
from fedgma.reports.pictures import make_pictures
from fedgma.reports.report import in_markdown, make_report
from fedgma.statistics.arms import rows
from run_folders import write_duel, write_run

GOLDEN = Path(__file__).with_name("golden.md")
FACTS = """(() => {
  const shown = [...document.querySelectorAll("figure svg")].filter(s => s.getBoundingClientRect().height > 100);
  const outside = [...document.querySelectorAll("table")].filter(t => !t.closest(".wide")
    || t.closest(".wide").getBoundingClientRect().right > document.documentElement.clientWidth);
  return {wide: document.documentElement.scrollWidth, pictures: shown.length, outside: outside.length,
    unnamed: shown.filter(s => s.getAttribute("role") !== "img" || !s.getAttribute("aria-label")).length,
    text: document.body.innerText.slice(0, 300)};
})()"""
COLUMN = """[...document.querySelector("table").tBodies[0].rows].map(row => parseFloat(row.cells[
  [...row.parentElement.parentElement.tHead.rows[0].cells].findIndex(head => head.textContent === "last10")
].textContent))"""
BUTTON = """[...document.querySelectorAll("th button")].find(one => one.textContent === "last10")"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two algorithms, mean against GMA on four seeds, everything measured, and a run that is still going."""
    out = tmp_path_factory.mktemp("runs")
    write_duel(out, extra=True, lift=1.2, seeds=4)
    more = {"algorithm": "fedadam", "server_learning_rate": 0.01, "mask_position": "after"}
    write_duel(out, extra=True, lift=-0.1, seeds=4, **more)
    write_run(out, seed=4, stop=7)
    return out


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    write_report(make_report([runs]), out)
    return out


def test_the_report_reads_as_the_one_kept_in_the_tree(runs):
    assert in_markdown(make_report([runs])) == GOLDEN.read_text(encoding="utf-8")


def test_a_report_is_a_page_tables_in_three_forms_and_pictures(written):
    tables = {path.name for path in (written / "tables").iterdir()}
    assert tables == {
        f"{name}.{ending}"
        for name in ("results", "differences-gma-mean", "splits", "unfinished")
        for ending in ("md", "tex", "csv")
    }
    kinds = {path.name.split("-")[0].split(".")[0] for path in (written / "pictures").iterdir()}
    assert kinds == {"accuracy", "agreement", "layers", "stability", "taus", "clients", "partition"}


def test_the_page_says_the_verdict_first(written, runs):
    text = (written / "report.html").read_text(encoding="utf-8")
    verdict = make_report([runs]).verdicts[0]
    said, limits = re.search(r'<p class="verdict">(.*?)\. <small>(.*?)\.</small></p>', text).groups()
    assert f"{unescape(said)}; {unescape(limits)}".lower() == verdict.lower()
    assert text.index(said) < text.index("<table>")


def test_a_verdict_over_several_settings_is_said_before_what_limits_it():
    made = _verdict("GMA ahead in 1 of 2 settings; over all settings: inconclusive: GMA < 2, 4 seeds; none <b>")
    assert made == (
        '<p class="verdict">GMA ahead in 1 of 2 settings; over all settings: inconclusive: GMA &lt; 2, 4 seeds. '
        "<small>None &lt;b&gt;.</small></p>"
    )
    assert _verdict("GMA and the mean are equal") == '<p class="verdict">GMA and the mean are equal. </p>'


def test_the_page_shows_the_unfinished_run(written):
    text = (written / "report.html").read_text(encoding="utf-8")
    assert "7 of 30" in text


def test_the_page_needs_nothing_but_itself(written):
    text = (written / "report.html").read_text(encoding="utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    checksum = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = unescape(re.search(r'Security-Policy" content="([^"]+)"', text)[1])
    assert policy == (f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{checksum}'")
    links = re.findall(r"""(?:src|href)\s*=\s*["']([^"']+)""", text) + re.findall(r"url\(([^)]+)\)", text)
    assert all(link.startswith(("#", "data:image/")) for link in links), links


def test_all_words_in_pictures_have_the_text_colour_of_the_page(written):
    words = re.findall(r"<text[^>]*>", (written / "report.html").read_text(encoding="utf-8"))
    assert len(words) > 100
    assert [word for word in words if "currentColor" not in word] == []


def test_pictures_of_one_page_do_not_share_an_id(written):
    ids = re.findall(r'\bid="([^"]+)"', (written / "report.html").read_text(encoding="utf-8"))
    assert len(ids) == len(set(ids)) > 100


def test_facts_of_the_data_are_listed_without_long_lists(tmp_path):
    folder = write_run(tmp_path, rounds=3)
    head = json.loads((folder / "run.json").read_text())
    head["data"] = {"shape": [1, 8, 8], "normalisation": {"mean": [0.5], "std": [0.25]}, "counts": [[1] * 9] * 9}
    (folder / "run.json").write_text(json.dumps(head))
    text = page(make_report([tmp_path]), [])
    assert ">shape [1, 8, 8], normalisation mean [0.5], std [0.25]<" in text


def test_whatever_a_run_folder_holds_is_text_on_the_page(tmp_path):
    evil = "<img src=x onerror=alert(1)>\"'&$\\frac{1}"
    for aggregator in ("mean", evil):
        folder = write_run(tmp_path, rounds=3, dataset=evil, aggregator=aggregator, model=evil, algorithm=evil)
        head = json.loads((folder / "run.json").read_text())
        head["versions"][evil] = evil
        (folder / "run.json").write_text(json.dumps(head))
        lines = (folder / "rounds.jsonl").read_text().replace("conv1.weight", json.dumps(evil)[1:-1])
        (folder / "rounds.jsonl").write_text(lines)
    made = make_report([tmp_path])
    text = page(made, make_pictures(made.rows))
    assert "<img" not in text + in_markdown(made)
    assert escape(evil) in text


@pytest.mark.parametrize(
    "mask",
    [
        {"histogram": [], "layers": []},
        {"histogram": ["a"], "layers": {"w": 3}},
        {"histogram": [1.0], "layers": {"w": {"below": "x"}}},
        {"histogram": [None, 0.5], "layers": {"w": {}}},
        {"histogram": {"0": 1}, "layers": "text"},
        {"histogram": 3, "layers": {"w": {"below": None}}},
        [],
        None,
    ],
)
def test_mask_statistics_that_cannot_be_drawn_are_left_out(tmp_path, mask):
    folder = write_run(tmp_path, rounds=2, dataset="mine.npz")
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    (folder / "rounds.jsonl").write_text("".join(json.dumps({**line, "mask": mask}) + "\n" for line in lines))
    assert [picture.name for picture in make_pictures(rows(read_runs([tmp_path])))] == ["accuracy"]


def test_learning_rates_are_a_heat_map_and_curves_are_those_of_the_best_pair(tmp_path):
    for rate, lift in ((0.1, 0), (1.0, 5)):
        write_run(tmp_path, server_learning_rate=rate, lift=lift, dataset="mine.npz")
    pictures = {picture.name: picture for picture in make_pictures(rows(read_runs([tmp_path])))}
    assert "rates" in pictures
    assert "accuracy-server-learning-rate-1" in pictures
    assert "accuracy-server-learning-rate-0.1" not in pictures
    assert "the pair with the highest last10" in pictures["accuracy-server-learning-rate-1"].caption


def test_a_partition_that_was_recorded_is_drawn_from_the_record(tmp_path):
    write_run(tmp_path, rounds=2, dataset="mine.npz", data={"counts": [[5, 0], [0, 7]]})
    names = [picture.name for picture in make_pictures(rows(read_runs([tmp_path])))]
    assert "partition-mine.npz-label-skew-clients-100-classes-per-client-2" in names


def test_the_partition_of_the_users_own_file_is_drawn_from_what_the_run_recorded(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(120, 4)).astype(np.float32), np.arange(120) % 3
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    chosen = {
        "dataset": str(tmp_path / "mine.npz"),
        "model": "logistic",
        "rounds": 1,
        "seed": 0,
        "clients_per_round": 2,
    }
    run({**chosen, "partition": {"name": "iid", "clients": 4}, "client_test_size": 0}, out=tmp_path / "runs")
    (tmp_path / "mine.npz").unlink()
    pictures = {picture.name: picture for picture in make_pictures(rows(read_runs([tmp_path / "runs"])))}
    (axes,) = pictures["partition-mine.npz-iid-clients-4"].figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2"]


def test_how_steady_a_mask_is_stands_beside_what_chance_would_give(tmp_path):
    write_run(tmp_path, rounds=4, dataset="mine.npz")
    (picture,) = [one for one in make_pictures(rows(read_runs([tmp_path]))) if one.kind == "How steady the mask is"]
    flips, again = picture.figure.axes
    lines = read_runs([tmp_path])[0].rounds
    np.testing.assert_allclose(flips.lines[0].get_ydata(), [100 * line["mask"]["flipped"] for line in lines[1:]])
    before, now = (line["mask"]["below"] for line in lines[2:])
    assert flips.lines[1].get_ydata()[-1] == pytest.approx(100 * (before * (1 - now) + now * (1 - before)))
    assert again.lines[1].get_ydata()[-1] == pytest.approx(100 * before * now / (before + now - before * now))
    assert "1 round earlier" in picture.caption


@needs_browser
@pytest.mark.parametrize(("width", "dark", "ground"), [(390, True, (20, 24, 28)), (1200, False, (255, 255, 255))])
def test_a_browser_shows_the_report_on_any_screen_in_the_colours_that_the_reader_prefers(
    written, browser, width, dark, ground
):
    with browser.page((written / "report.html").as_uri(), width, dark=dark) as page:
        seen = page.run(FACTS)
        pixels = np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
        assert page.complaints == []
    assert seen["wide"] <= width
    assert (seen["outside"], seen["unnamed"], seen["pictures"]) == (0, 0, 13)
    assert "GMA ahead in" in seen["text"]
    assert tuple(pixels[-1, 0]) == ground
    assert len(np.unique(pixels[::4, ::4].reshape(-1, 3), axis=0)) > 20


@needs_browser
def test_tables_can_be_sorted_by_the_keyboard_and_long_ones_filtered(written, browser):
    with browser.page((written / "report.html").as_uri()) as page:
        page.run(f"{BUTTON}.focus()")
        page.press("Enter")
        up, said = page.run(COLUMN), page.run(f"{BUTTON}.closest('th').ariaSort")
        page.press("Enter")
        down = page.run(COLUMN)
        page.run("document.querySelector('input.filter').focus()")
        page.press(*"learning RATE")
        left = page.run(
            "[...document.querySelector('input.filter').nextElementSibling.querySelectorAll('tbody tr')]"
            ".filter(row => !row.hidden).map(row => row.cells[0].textContent)"
        )
        filters, tables = (
            page.run(f"document.querySelectorAll('{what}').length") for what in ("input.filter", "table")
        )
    assert (len(up), up, said) == (4, sorted(up), "ascending")
    assert down == sorted(up, reverse=True)
    assert left == ["client_learning_rate"]
    assert 0 < filters < tables
