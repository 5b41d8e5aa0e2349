"""The command line: one module for each command. The work itself is done by the library."""

import sys


def main() -> None:
    """Entry point of the `fedgma` script. If the extra `sim` is missing, exit with the command that installs it."""
    try:
        import typer  # noqa: F401
    except ImportError:
        sys.exit("The fedgma command needs the simulator's packages: pip install 'fedgma[sim]'")
    from fedgma.cli.app import run_app

    run_app()
