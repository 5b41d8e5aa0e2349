"""The command line: one module a command, each a thin face on the library."""

import sys


def main() -> None:
    """Entry point of the `fedgma` script; says what to install where the extra is missing."""
    try:
        import typer  # noqa: F401
    except ImportError:
        sys.exit("The fedgma command needs the simulator's packages: pip install 'fedgma[sim]'")
    from fedgma.cli.app import run_app

    run_app()
