"""A report as one self-contained HTML page without network access, in light and dark colours.

Its one script sorts and filters tables. The page's policy allows that script by its checksum and nothing else.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fedgma.documents import PathLike
from fedgma.records.label import read_label
from fedgma.records.reader import Run
from fedgma.reports.pictures import Picture, make_pictures
from fedgma.reports.plots.style import save, svg
from fedgma.reports.report import Report, common_settings, varied_settings, with_limits, write_tables
from fedgma.reports.sheet import STYLE, allowed
from fedgma.reports.tables import Table, html
from fedgma.statistics.arms import last_rounds
from fedgma.statistics.labels import capitalised, plain

LONG = 8  # rows; a longer table can be filtered
SHORT = 4  # entries; a longer list of a fact is left out
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
POLICY = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed(SCRIPT)}"


def page(report: Report, pictures: Sequence[Picture]) -> str:
    """The whole page as HTML text."""
    parts = [
        *map(_verdict, report.verdicts),
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
    pictures = make_pictures(report.rows, report.comparisons)
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
    single = [
        _figure(picture, f"{kind}: {picture.title}".rstrip(": "))
        for kind, (picture, *rest) in kinds.items()
        if not rest
    ]
    return "\n".join([*many, _section("Pictures", _grid(single)) if single else ""])


def _kind(pictures: Sequence[Picture]) -> str:
    shared = len({picture.caption for picture in pictures}) == 1
    figures = [_figure(picture, picture.title, caption=not shared) for picture in pictures]
    return _grid(figures) + (f'<p class="note">{escape(pictures[0].caption)}</p>' if shared else "")


def _grid(figures: Sequence[str]) -> str:
    return '<div class="pictures">\n' + "\n".join(figures) + "\n</div>"


def _verdict(sentence: str) -> str:
    """A verdict: what it says, and below it in smaller type what limits it."""
    said, limits = with_limits(sentence)
    small = f"<small>{escape(capitalised(limits))}.</small>" if limits else ""
    return f'<p class="verdict">{escape(said)}. {small}</p>'


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
    """A recorded fact in words, without long lists and what holds nothing else."""
    if isinstance(value, Mapping):
        items = {key: _fact(item) for key, item in value.items()}
        return ", ".join(f"{key} {text}" for key, text in items.items() if text)
    if isinstance(value, list):
        short = len(value) <= SHORT and not any(isinstance(item, list | Mapping) for item in value)
        return f"[{plain(value)}]" if short and value else ""
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
        "of several settings each is corrected within its table, the comparisons of the page together. It leaves "
        "out pairs in which a run diverged; the tables hold all pairs.</p>",
    )
