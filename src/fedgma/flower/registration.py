"""Registers node keys with a SuperLink by Flower's command line, all in one process: each would take seconds to start.

    python -m fedgma.flower.registration CONNECTION KEY...

Prints one answer of `flwr supernode register --format json` for each key. A key is registered under its file's name.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Register the keys in order; one that fails does not stop the others."""
    import click

    flower: Any = importlib.import_module("flwr.cli.app").app
    connection, *keys = sys.argv[1:]
    for key in keys:
        words = ["supernode", "register", key, connection, "--name", Path(key).stem, "--format", "json"]
        try:
            flower(words, standalone_mode=False)
        except (click.ClickException, SystemExit) as error:  # Flower has printed no answer
            print(json.dumps({"success": False, "error-message": str(error)}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
