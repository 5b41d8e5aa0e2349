"""The style sheet of HTML pages, in light and dark colours, and the checksum by which a page allows its script."""

import base64
import hashlib

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
.verdict small { display: block; font-size: 1rem; line-height: 1.45; font-weight: 400; color: var(--soft); }
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


def allowed(text: str) -> str:
    """An inline script or style sheet as a source in a page's policy, by its checksum."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
