"""Commands called in this process; they are built once, since that takes longer than most of them run."""

import contextlib
import io
import sys

import typer

from fedgma.cli import app

TYPER, BUILT = app.app, typer.main.get_command(app.app)


@contextlib.contextmanager
def built():
    """Inside, the root of the command line is built; a test's own root stays."""
    given = app.app
    app.app = BUILT if given is TYPER else given
    try:
        yield
    finally:
        app.app = given


def call(*words):
    """Exit code of a command, what it printed and what it said on stderr."""
    before, printed, said, code = sys.argv, io.StringIO(), io.StringIO(), 0
    sys.argv = ["fedgma", *map(str, words)]
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said), built():
            app.run_app()
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        sys.argv = before
    return code, printed.getvalue(), said.getvalue()
