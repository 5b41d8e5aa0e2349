"""The live page of `fedgma watch` in a real browser."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from browser import needs_browser
from fedgma.records.label import Label, write_label
from live_server import serving
from run_folders import play_small, write_duel, write_run

pytestmark = needs_browser
ROWS = "[...document.querySelectorAll('#live tbody tr')]"
TEXTS = f"{ROWS}.map(row => [...row.cells].map(cell => cell.textContent))"
OUTSIDE = """[...document.querySelectorAll("figure, header > *, input")].filter(
  one => one.getBoundingClientRect().right > innerWidth + .5)"""
UNNAMED = ":is(svg, input, progress):not([aria-label], [aria-hidden]), svg:not([role=img], [aria-hidden])"
EVIL = "<img src=x onerror=window.evil=1><script>window.evil=1</script>\"'&"


@pytest.fixture(scope="module")
def duel(tmp_path_factory):
    """The address of a page of two arms on three seeds."""
    out = tmp_path_factory.mktemp("duel")
    folders = write_duel(out, seeds=3, stop=12)
    write_label(folders[0], Label("wide nets", "a note that is long enough to need more than one line in its cell"))
    with serving(out) as server:
        yield server.address


def test_the_page_follows_a_run_that_is_played(tmp_path, browser):
    playing = play_small(tmp_path / "runs")
    with serving(tmp_path / "runs") as server, browser.page(server.address) as page:
        page.wait("document.body.innerText.includes('No run yet')")
        next(playing)
        page.run("ask()")
        page.wait(f"{ROWS}[0]?.cells[3].textContent === '1 of 4'")
        assert page.run(TEXTS)[0][:3] == ["GMA", "0", "running"]
        assert page.run("document.querySelector('[role=status]').textContent") == "1 run: 1 running"
        list(playing)
        page.run("ask()")
        page.wait(f"{ROWS}[0].cells[3].textContent === '4 of 4'")
        assert page.run(TEXTS)[0][2] == "done"
        charts = page.run("[...document.querySelectorAll('figure:not([hidden]) svg.chart')].map(s => s.ariaLabel)")
        assert [label.split(" by round: GMA")[0] for label in charts] == [
            "test accuracy, %",
            "test loss",
            "training loss",
            "mean of the mask",
            "agreement of clients",
        ]
        assert page.complaints == []


def test_runs_are_filtered_in_table_and_pictures(duel, browser):
    with browser.page(duel) as page:
        page.wait(f"{ROWS}.length === 6")
        page.run("document.querySelector('input.filter').focus()")
        page.press(*"seed=2 GMA")
        page.wait(f"{ROWS}.length === 1")
        assert page.run(TEXTS)[0][:2] == ["GMA", "2"]
        assert page.run("document.querySelector('ul.key').children.length") == 1
        page.run("document.querySelector('input.filter').select()")
        page.press(*"WIDE")
        page.wait(f"{ROWS}.length === 1")
        assert "wide nets" in page.run(TEXTS)[0][8]


@pytest.mark.parametrize("width", [390, 1200])
def test_long_names_of_arms_are_whole(tmp_path, browser, width):
    for algorithm in ("fedavg", "fedadam"):
        for tau in (0.2, 0.4):
            write_run(tmp_path, rounds=3, algorithm=algorithm, client_learning_rate=0.0125, tau=tau)
            write_run(tmp_path, rounds=3, algorithm=algorithm, client_learning_rate=0.125, tau=tau)
    names = "[...document.querySelectorAll('td .arm, ul.key .name')]"
    cut = "one.scrollHeight > one.clientHeight + 1 || one.scrollWidth > one.clientWidth + 1"
    with serving(tmp_path) as server, browser.page(server.address, width) as page:
        page.wait(f"{ROWS}.length === 8")
        assert "client learning rate 0.0125, GMA, tau 0.2" in page.run("document.querySelector('ul.key').innerText")
        assert page.run(f"{names}.filter(one => {cut}).length") == 0
        assert page.run("[...document.querySelectorAll('td .arm')].every(one => one.clientWidth > 100)")


def test_runs_are_sorted_by_the_keyboard(duel, browser):
    with browser.page(duel) as page:
        page.wait(f"{ROWS}.length === 6")
        names = page.run("[...document.querySelectorAll('#live th button')].map(one => one.textContent)")
        assert "accuracy, %" in names
        place = names.index("accuracy, %")
        page.run(f"document.querySelectorAll('#live th button')[{place - 1}].focus()")
        page.press("Tab", "Enter")
        up = [float(row[place]) for row in page.run(TEXTS)]
        assert page.run(f"document.querySelectorAll('#live th')[{place}].ariaSort") == "ascending"
        page.press("Enter")
        down = [float(row[place]) for row in page.run(TEXTS)]
    assert (len(up), up, down) == (6, sorted(up), sorted(up, reverse=True))


def test_a_picture_is_read_by_hovering_and_by_the_keyboard(duel, browser):
    value = "document.querySelector('ul.key .value').textContent.trim()"
    with browser.page(duel) as page:
        page.wait(f"{ROWS}.length === 6")
        latest = page.run(value)
        box = page.run(
            "(({x, y, width, height}) => [x, y, width, height])"
            "(document.querySelector('svg.chart').getBoundingClientRect())"
        )
        page.move(box[0] + box[2] * 0.2, box[1] + box[3] / 2)
        page.wait("document.querySelector('figure h3').textContent.includes('round 4')")
        hovered = page.run(value)
        page.move(1, 1)
        page.wait(f"{value} === '{latest}'")
        page.run("document.querySelector('svg.chart').focus()")
        page.press("Home", *["ArrowRight"] * 3)
        assert page.run(value) == hovered != latest
        spoken = page.run("[...document.querySelectorAll('[role=status]')].at(-1).textContent")
        assert spoken.startswith("test accuracy, %, round 4: mean")
        page.press("Escape")
        assert page.run(value) == latest


@pytest.mark.parametrize(("width", "dark", "ground"), [(390, True, (20, 24, 28)), (1200, False, (255, 255, 255))])
def test_the_page_fits_any_screen_in_the_colours_that_the_reader_prefers(duel, browser, width, dark, ground):
    with browser.page(duel, width, dark=dark) as page:
        page.wait(f"{ROWS}.length === 6")
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run(f"{OUTSIDE}.length") == 0
        assert page.run(f"document.querySelectorAll('{UNNAMED}').length") == 0
        pixels = np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
    assert tuple(pixels[-1, 0]) == ground
    assert len(np.unique(pixels[::4, ::4].reshape(-1, 3), axis=0)) > 20


def test_names_of_runs_are_text_and_nothing_more(tmp_path, browser):
    folder = write_run(tmp_path, rounds=3, aggregator=EVIL, dataset=EVIL)
    write_run(tmp_path, rounds=3, aggregator="mean", dataset=EVIL)
    write_label(folder, Label(EVIL[:80], EVIL))
    (tmp_path / "<b>evil").mkdir()
    (tmp_path / "<b>evil" / "run.json").write_text(json.dumps({"format": EVIL}))
    with serving(tmp_path) as server, browser.page(server.address) as page:
        page.wait(f"{ROWS}.length === 3")
        assert EVIL in str(page.run("document.body.innerText"))
        assert page.run("window.evil") is None
        assert page.run("document.querySelectorAll('img, #live script, b').length") == 0
        page.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.evil=1>')")
        page.wait("document.querySelector('img').complete")
        assert page.run("window.evil") is None  # the policy refuses what an error of ours would let in
        assert page.complaints


def test_a_page_that_gets_no_answer_says_so_and_tries_again(duel, browser):
    said = "document.getElementById('alert').textContent"
    with browser.page(duel) as page:
        page.wait(f"{ROWS}.length === 6")
        page.ask("Network.enable")
        slow = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        page.ask("Network.emulateNetworkConditions", offline=True, **slow)
        page.run("ask()")
        assert page.run(said).startswith("No answer from fedgma watch")
        assert page.run(f"{ROWS}.length") == 6
        page.ask("Network.emulateNetworkConditions", offline=False, **slow)
        page.run("ask()")
        assert page.run(said) == ""


def test_a_page_without_a_script_is_a_table_that_is_loaded_again(tmp_path, browser):
    write_duel(tmp_path, seeds=1, rounds=3)
    with serving(tmp_path) as server, browser.page("about:blank#") as page:
        page.ask("Emulation.setScriptExecutionDisabled", value=True)
        page.ask("Page.navigate", url=server.address)
        page.wait("document.querySelectorAll('#plain tbody tr').length === 2")
        assert page.run("document.querySelector('meta[http-equiv=refresh]').content") == "5"


def test_how_to_go_on_is_said_once_below_the_table(duel, browser):
    with browser.page(duel) as page:
        page.wait(f"{ROWS}.length === 6")
        assert page.run("document.querySelector('.advice').innerText").startswith("6 runs stopped; to resume: ")
        assert not any("to resume" in cell for row in page.run(TEXTS) for cell in row)
