"""Commands called in this process."""

import contextlib
import io
import sys

from fedgma.cli.app import run_app


def call(*words):
    """Exit code of a command, what it printed and what it said on stderr."""
    before, printed, said, code = sys.argv, io.StringIO(), io.StringIO(), 0
    sys.argv = ["fedgma", *map(str, words)]
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
            run_app()
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        sys.argv = before
    return code, printed.getvalue(), said.getvalue()
