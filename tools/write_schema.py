"""Write results/README.md: what the exported files hold, field by field.

python tools/write_schema.py
"""

from collections.abc import Mapping
from pathlib import Path

from fedgma.paper import schema
from fedgma.paper.catalogue import catalogue

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGE = RESULTS / "README.md"

START = """# Exported runs

The runs behind [the replication](../docs/replication.md), thinned, one folder for each experiment. Runs are shared: two
experiments may hold the same run, under the same fingerprint. [provenance.md](provenance.md) lists device, precision,
versions, commit and command of all of them. Licence: that of the repository.

| file | what it holds |
| --- | --- |
| `ID/runs.json` | what the runs of an experiment share |
| `ID/runs.jsonl` | one line for each run, a JSON object |
| `ID/report.md` | claims, cells and notes, written from the two files above |
| `ID/tables/*.csv`, `.md`, `.tex` | its tables; the columns are explained below each table in `report.md` |
| `ID/pictures/*.png` | its figures |
| `ID/README.md`, `ID/findings.json`, `ID/*.csv` | of an analysis: its tables, its findings with verdicts, the numbers |

`fedgma paper compare ID results/ID` makes report, tables and figures again. `fedgma paper results NEW results --out
results` adds runs; it never removes one. `make archive` writes all of it, with plans, printed numbers and checksums, to
one file, in which `runs.csv` has all runs in one table.
"""


def fields(title: str, described: Mapping[str, str]) -> str:
    """A table of names and meanings under a heading."""
    rows = "\n".join(f"| `{name}` | {what} |" for name, what in described.items())
    return f"## {title}\n\n| name | what it holds |\n| --- | --- |\n{rows}\n"


def page() -> str:
    """The page as Markdown."""
    folders = [name for name in catalogue() if (RESULTS / name).is_dir()]
    experiments = {name: f"{catalogue()[name].title} ({catalogue()[name].source})" for name in folders}
    tables = {
        "Folders": experiments,
        "`runs.json`": schema.SHARED,
        "An entry of `circumstances`": schema.CIRCUMSTANCES,
        "A line of `runs.jsonl`": schema.LINE,
        "`facts` of a line": schema.FACTS,
        "Splits": schema.SPLITS,
        "Columns of `runs.csv` in the archive": {
            **schema.COLUMNS,
            "SETTING": "every setting by its dotted name, as in docs/experiments.md",
            "SPLIT_best_percent": "highest accuracy of the evaluated rounds",
            "SPLIT_last10_percent": "mean accuracy of the last ten rounds",
            "SPLIT_final_percent": "accuracy after the last round",
        },
    }
    return "\n".join([START, *(fields(title, described) for title, described in tables.items())])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
