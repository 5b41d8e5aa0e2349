"""Settings of runs that play in a second, and commands called in this process."""

import contextlib
import io
import sys

from fedgma.cli.app import run_app

SMALL = {
    "model": "logistic",
    "rounds": 6,
    "partition": {"clients": 20},
    "cohort": 4,
    "evaluate_every": 2,
    "mask_every": 2,
    "client_test_size": 50,
    "client_learning_rate": 0.01,
}


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
