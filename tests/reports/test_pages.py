import base64
import hashlib
import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedgma.experiments.play import run
from fedgma.records.reader import read_runs
from fedgma.reports.pages import page, write_report
from fedgma.reports.pictures import make_pictures
from fedgma.reports.report import in_markdown, make_report
from fedgma.statistics.arms import rows
from run_folders import write_duel, write_run

GOLDEN = Path(__file__).with_name("golden.md")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
PROBE = """<script>onload = () => {
  const d = f.contentDocument;
  const shown = [...d.querySelectorAll("figure svg")].filter(s => s.getBoundingClientRect().height > 100);
  const outside = [...d.querySelectorAll("table")].filter(t => !t.closest(".wide")
    || t.closest(".wide").getBoundingClientRect().right > d.documentElement.clientWidth);
  document.title = JSON.stringify({wide: d.documentElement.scrollWidth, pictures: shown.length,
    outside: outside.length, text: d.body.innerText.slice(0, 300)});
}</script>"""
SORT_AND_FILTER = """<script>onload = () => {
  const d = f.contentDocument, table = d.querySelector("table");
  const column = [...table.tHead.rows[0].cells].findIndex(head => head.textContent === "last10");
  const values = () => [...table.tBodies[0].rows].map(row => parseFloat(row.cells[column].textContent));
  const head = table.tHead.rows[0].cells[column], button = head.querySelector("button");
  button.click();
  const up = values(), said = head.getAttribute("aria-sort");
  button.click();
  const filter = d.querySelector("input.filter"), filtered = filter.nextElementSibling.querySelector("table");
  filter.value = "learning RATE";
  filter.dispatchEvent(new Event("input"));
  const left = [...filtered.tBodies[0].rows].filter(row => !row.hidden).map(row => row.cells[0].textContent);
  document.title = JSON.stringify({up, said, down: values(), left, filters: d.querySelectorAll("input.filter").length});
}</script>"""


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


def test_the_page_says_the_verdict_first_and_shows_the_unfinished_run(written, runs):
    text = (written / "report.html").read_text(encoding="utf-8")
    verdict = make_report([runs]).verdicts[0]
    assert escape(verdict) in text
    assert text.index(escape(verdict)) < text.index("<table>")
    assert "7 of 30" in text


def test_the_page_needs_nothing_but_itself(written):
    text = (written / "report.html").read_text(encoding="utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    checksum = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = unescape(re.search(r'Security-Policy" content="([^"]+)"', text)[1])
    assert policy == (f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{checksum}'")
    links = re.findall(r"""(?:src|href)\s*=\s*["']([^"']+)""", text) + re.findall(r"url\(([^)]+)\)", text)
    assert all(link.startswith(("#", "data:image/")) for link in links), links


def test_pictures_of_one_page_do_not_share_an_id(written):
    ids = re.findall(r'\bid="([^"]+)"', (written / "report.html").read_text(encoding="utf-8"))
    assert len(ids) == len(set(ids)) > 100


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


def browse(folder, *arguments):
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; apt install chromium")


def probe(written, folder, script, width):
    """What a script says about the page, shown in a frame of this width."""
    inside = escape((written / "report.html").read_text(encoding="utf-8"))
    frame = folder / "frame.html"
    style = f"width:{width}px;height:900px;border:0"
    iframe = f'<iframe id="f" style="{style}" srcdoc="{inside}"></iframe>'
    frame.write_text(f'<meta charset="utf-8">{iframe}{script}', encoding="utf-8")
    shown = browse(folder, f"--window-size={width + 100},900", "--dump-dom", frame.as_uri())
    return json.loads(unescape(re.search("<title>(.*?)</title>", shown, re.DOTALL)[1]))


@needs_browser
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_shows_the_page_without_scrolling_sideways(written, tmp_path, width):
    seen = probe(written, tmp_path, PROBE, width)
    assert seen["wide"] <= width
    assert not seen["outside"]
    assert seen["pictures"] == 13
    assert "GMA ahead in" in seen["text"]


@needs_browser
def test_tables_can_be_sorted_and_long_ones_filtered(written, tmp_path):
    seen = probe(written, tmp_path, SORT_AND_FILTER, 800)
    assert len(seen["up"]) == 4
    assert (seen["up"], seen["said"]) == (sorted(seen["up"]), "ascending")
    assert seen["down"] == sorted(seen["up"], reverse=True)
    assert seen["left"] == ["client_learning_rate"]
    assert seen["filters"] < len(re.findall("<table>", (written / "report.html").read_text(encoding="utf-8")))


@needs_browser
@pytest.mark.parametrize(("scheme", "ground"), [(0, (20, 24, 28)), (1, (255, 255, 255))])
def test_a_screenshot_is_dark_or_light_as_the_reader_prefers(written, tmp_path, scheme, ground):
    shot = tmp_path / "shot.png"
    options = ("--window-size=1200,900", f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={shot}")
    browse(tmp_path, *options, (written / "report.html").as_uri())
    pixels = np.asarray(Image.open(shot).convert("RGB"))
    assert tuple(pixels[-1, 0]) == ground
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50
