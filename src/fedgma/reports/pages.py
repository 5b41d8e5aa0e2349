"""A report as one self-contained HTML page without network access, in light and dark colours.

Its one script sorts and filters tables. The page's policy allows that script by its checksum and nothing else.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fedgma.documents import PathLike
from fedgma.records.label import read_label
from fedgma.records.reader import Run
from fedgma.reports.pictures import Picture, make_pictures
from fedgma.reports.plots.style import save, svg
from fedgma.reports.report import Report, common_settings, varied_settings, write_tables
from fedgma.reports.tables import Table, html
from fedgma.statistics.arms import last_rounds
from fedgma.statistics.labels import plain

STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #59636e; --paper: #fff; --card: #f5f7f9; --line: #d9dee4;
  --accent: #2b83c6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaee; --soft: #9aa5b1; --paper: #14181c; --card: #1d2329; --line: #39424b; --accent: #5aa9e6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 72rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.25rem; font-weight: 600; color: var(--soft); margin: 0 0 .6rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
.verdict { font-size: clamp(1.25rem, 4.5vw, 1.7rem); line-height: 1.3; font-weight: 600; margin: 0 0 .6rem;
  padding-left: .8rem; border-left: .3rem solid var(--accent); }
ul.notes { margin: 0; padding-left: 1.2rem; color: var(--soft); }
/* a shadow at an edge says that the box can be scrolled that way */
.wide { overflow-x: auto; overflow-wrap: normal; margin: 0 -.2rem; max-width: 100%;
  background: linear-gradient(90deg, var(--paper) 30%, transparent) 0 0 / 2rem 100% no-repeat local,
    linear-gradient(270deg, var(--paper) 30%, transparent) 100% 0 / 2rem 100% no-repeat local,
    linear-gradient(90deg, var(--line), transparent) 0 0 / .6rem 100% no-repeat,
    linear-gradient(270deg, var(--line), transparent) 100% 0 / .6rem 100% no-repeat; }
.wide:focus-visible { outline: 2px solid var(--accent); }
input.filter { font: inherit; font-size: .85rem; color: inherit; background: var(--paper); margin: 0 0 .4rem;
  padding: .25rem .5rem; border: 1px solid var(--line); border-radius: .3rem; width: min(100%, 16rem); }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid var(--accent); }
th[aria-sort] button { color: var(--ink); }
th[aria-sort=ascending] button::after { content: " \2191"; }
th[aria-sort=descending] button::after { content: " \2193"; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; color: var(--soft); vertical-align: bottom; white-space: normal; }
td.long { white-space: normal; min-width: 16rem; overflow-wrap: anywhere; }
.n { text-align: right; }
p.note, figcaption { color: var(--soft); font-size: .85rem; margin: .4rem 0 0; }
.pictures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  max-width: 68rem; }
figure { margin: 0; padding: .8rem; background: var(--card); border-radius: .5rem; min-width: 0; }
figure.broad { grid-column: 1 / -1; }
figure svg { display: block; width: 100%; height: auto; max-width: 38rem; }
figure.broad { overflow-x: auto; } figure.broad svg { max-width: none; min-width: 44rem; }
figure h3 { font-size: .95rem; margin: 0 0 .4rem; }
details { margin-top: .6rem; } summary { cursor: pointer; }
code { font-size: .85em; }
@media (max-width: 32rem) {
  body { padding: .8rem; } figure { padding: .5rem .3rem; } table { font-size: .8rem; }
  th, td { padding: .3rem .35rem; } }
@media print {
  :root { --ink: #000; --soft: #444; --paper: #fff; --card: #fff; --line: #ccc; }
  body { max-width: none; padding: 0; font-size: 10pt; } h2 { break-after: avoid; }
  figure { break-inside: avoid; border: 1px solid var(--line); } figure.broad svg { min-width: 0; }
  .pictures { grid-template-columns: 1fr 1fr; } tr { break-inside: avoid; } p.note { break-before: avoid; }
  .wide { overflow: visible; background: none; } input.filter { display: none; }
  th, td { white-space: normal; padding: .15rem .4rem; } }
"""
LONG = 8  # rows; a longer table can be filtered
SCRIPT = """
const value = row => column => {
  const text = row.cells[column].textContent;
  return /^[+-]?[\\d.]+(e[+-]?\\d+)?( |$)/.test(text) ? parseFloat(text) : text;
};
const compare = (a, b) => typeof a === "number" && typeof b === "number" ? a - b
  : (typeof a === "string") - (typeof b === "string") || String(a).localeCompare(String(b));
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows[0].cells];
  if (rows.length > 1) heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "sort";
    button.append(...head.childNodes);
    head.append(button);
    button.onclick = () => {
      const up = head.ariaSort !== "ascending";
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      rows.sort((a, b) => (up ? 1 : -1) * compare(value(a)(column), value(b)(column)));
      body.append(...rows);
    };
  });
  if (rows.length > LONG) {
    const filter = document.createElement("input");
    filter.type = "search";
    filter.className = "filter";
    filter.placeholder = `filter ${rows.length} rows`;
    filter.setAttribute("aria-label", "show the rows of this table that contain these words");
    filter.oninput = () => {
      const words = filter.value.toLowerCase().split(/\\s+/);
      for (const row of rows) {
        const text = [...row.cells].map(cell => cell.textContent.toLowerCase()).join(" ");
        row.hidden = !words.every(word => text.includes(word));
      }
    };
    table.parentElement.before(filter);
  }
}
""".replace("LONG", str(LONG))
CHECKSUM = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{CHECKSUM}'"


def page(report: Report, pictures: Sequence[Picture]) -> str:
    """The whole page as HTML text."""
    parts = [
        *(f'<p class="verdict">{escape(verdict)}.</p>' for verdict in report.verdicts),
        f'<ul class="notes">{"".join(f"<li>{escape(note)}.</li>" for note in report.notes)}</ul>',
        *map(_table, report.tables),
        _pictures(pictures),
        _settings(report.runs),
        _provenance(report.runs),
        _method(report.runs),
    ]
    title = escape(report.title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n"
        + "\n".join(part for part in parts if part)
        + f"\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def write_report(report: Report, out: PathLike) -> Path:
    """Write report.html, report.md, the tables and the pictures into a folder; returns the page."""
    out = Path(out)
    pictures = make_pictures(report.rows)
    write_tables(report, out)
    (out / "pictures").mkdir(exist_ok=True)
    for picture in pictures:
        for ending in ("png", "svg"):
            save(picture.figure, out / "pictures" / f"{picture.name}.{ending}")
    written = out / "report.html"
    written.write_text(page(report, pictures), encoding="utf-8")
    return written


def _section(title: str, inside: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{inside}\n</section>"


def _table(table: Table) -> str:
    note = f'<p class="note">{escape(table.note).replace("`", "")}</p>' if table.note else ""
    return _section(table.title, _rows(table) + note)


def _rows(table: Table) -> str:
    """A table in a box that scrolls sideways where it is too wide, also by the keyboard."""
    label = escape(table.title or table.header[0])
    return f'<div class="wide" tabindex="0" role="region" aria-label="{label}">{html(table)}</div>'


def _pictures(pictures: Sequence[Picture]) -> str:
    """Figures by kind: a kind with several settings has its own heading and one caption; the others share a grid."""
    kinds: dict[str, list[Picture]] = {}
    for picture in pictures:
        kinds.setdefault(picture.kind, []).append(picture)
    many = [_section(kind, _kind(drawn)) for kind, drawn in kinds.items() if len(drawn) > 1]
    single = [_figure(one, f"{kind}: {one.title}".rstrip(": ")) for kind, (one, *rest) in kinds.items() if not rest]
    return "\n".join([*many, _section("Pictures", _grid(single)) if single else ""])


def _kind(pictures: Sequence[Picture]) -> str:
    shared = len({picture.caption for picture in pictures}) == 1
    figures = [_figure(picture, picture.title, caption=not shared) for picture in pictures]
    return _grid(figures) + (f'<p class="note">{escape(pictures[0].caption)}</p>' if shared else "")


def _grid(figures: Sequence[str]) -> str:
    return '<div class="pictures">\n' + "\n".join(figures) + "\n</div>"


def _figure(picture: Picture, title: str, *, caption: bool = True) -> str:
    broad = ' class="broad"' if picture.figure.get_figwidth() > 7 else ""
    under = f"<figcaption>{escape(picture.caption)}</figcaption>" if caption else ""
    return f"<figure{broad}><h3>{escape(title)}</h3>\n{_svg(picture)}\n{under}</figure>"


def _svg(picture: Picture) -> str:
    label = f'<svg role="img" aria-label="{escape(f"{picture.kind}: {picture.title}. {picture.caption}")}"'
    return svg(picture.figure, picture.name).replace("<svg", label, 1)


def _settings(runs: Sequence[Run]) -> str:
    varied = tuple(varied_settings(runs).items())
    shared = [(name, plain(value)) for name, value in common_settings(runs).items() if value is not None]
    first = Table("varied", "", ("varied", "values"), varied)
    second = Table("shared", "", ("shared by all runs", "value"), tuple(shared))
    rest = f"<details open><summary>All others</summary>{_rows(second)}</details>"
    return _section("Settings", (_rows(first) if varied else "") + rest)


def _provenance(runs: Sequence[Run]) -> str:
    """Versions, device, data with checksums, and every run folder."""
    head = runs[0].head
    facts = [
        (name, _listed(runs, name))
        for name in ("device", "versions", "git", "command", "data", "parameters")
        if name in head
    ]
    folders = [(run.folder.name, read_label(run.folder).name, run.seed, _state(run), _hash(run)) for run in runs]
    listed = Table("folders", "", ("run", "name", "seed", "state", "final parameters, SHA-256"), tuple(folders))
    facts_table = Table("facts", "", ("what", "value"), tuple(facts))
    inside = _rows(facts_table) + f"<details><summary>{len(runs)} run folders</summary>{_rows(listed)}</details>"
    return _section("Where the numbers come from", inside)


def _state(run: Run) -> str:
    return "finished" if run.finished else f"round {len(run.rounds)} of {run.planned}"


def _hash(run: Run) -> str:
    return "" if run.done is None else str(run.done.get("sha256", ""))[:16]


def _listed(runs: Sequence[Run], name: str) -> str:
    """The distinct values of a fact; long lists inside it are left out."""
    values = dict.fromkeys(_fact(run.head.get(name)) for run in runs)
    return "; ".join(values)


def _fact(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_fact(item)}" for key, item in value.items() if not isinstance(item, list))
    return plain(value)


def _method(runs: Sequence[Run]) -> str:
    late = last_rounds(runs) if runs else "last rounds"
    return _section(
        "How the verdict is computed",
        "<p>Runs with the same seed and settings are paired. The verdict is on the mean of the paired differences of "
        f"the {late}, with its 95 % confidence interval (Student's t). Fewer than four seeds are preliminary. "
        "An arm is ahead only where the p value of the paired t test, corrected by Holm's method, is below 5 %; "
        "otherwise the result is inconclusive, and the sentence says how many seeds would give the test a power of "
        "80 %. With several settings, the verdict is over those that have converged, each seed averaged over them; "
        "single settings are corrected within their table, the comparisons of the page together. The verdict leaves "
        "out pairs in which a run diverged; the tables hold all pairs.</p>",
    )
