"""The live page: a table that is there without a script, and the script that keeps it and the curves up to date."""

from html import escape
from pathlib import Path

from fedgma.reports.colours import BASE, COLOURS
from fedgma.reports.live.runs import LiveRuns
from fedgma.reports.sheet import STYLE, allowed
from fedgma.reports.tables import html

HERE = Path(__file__).parent
SCRIPT = (HERE / "page.js").read_text(encoding="utf-8")
ARMS = " ".join([f"--base: {BASE};", *(f"--arm{place}: {colour};" for place, colour in enumerate(COLOURS))])
SHEET = f"{STYLE}:root {{ {ARMS} }}\n{(HERE / 'page.css').read_text(encoding='utf-8')}"
POLICY = "; ".join(
    [
        "default-src 'none'",
        f"style-src {allowed(SHEET)}",
        f"script-src {allowed(SCRIPT)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
SECONDS = 5  # after which a page without a script is loaded again


def page(runs: LiveRuns) -> str:
    """The page as HTML text."""
    table = runs.table()
    title = escape(f"fedgma watch: {', '.join(map(str, runs.paths))}")
    none = "" if table.rows else "<p>No run yet. The page fills when runs begin.</p>"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f'<noscript><meta http-equiv="refresh" content="{SECONDS}"></noscript>\n'
        f"<title>{title}</title>\n<style>{SHEET}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n"
        f'<div id="live"></div>\n<div id="plain">{none}'
        f'<div class="wide" tabindex="0" role="region" aria-label="Runs">{html(table)}</div></div>\n'
        f"</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )
