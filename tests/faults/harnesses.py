"""Harnesses of benchmarks/faults in children of one process that has loaded everything: starting takes seconds.

As a script it reads lines of JSON, [harness, option, ...], and answers each with a line [exit code, what it printed].
"""

import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
MEMORY = "/dev/shm"  # where there is one, files are written to it: nothing waits for a disk
BENCHMARKS = HERE.parents[1] / "benchmarks" / "faults"


@contextlib.contextmanager
def prepared():
    """Inside, `run(name, *options)` gives the last line of a harness, which must hold."""
    command = [sys.executable, str(Path(__file__))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as host:

        def run(name, *options):
            folder = ["--folder", MEMORY] if os.access(MEMORY, os.W_OK) else []
            print(json.dumps([name, *map(str, options), *folder]), file=host.stdin, flush=True)
            code, said = json.loads(host.stdout.readline())
            assert code == 0, said
            return said.splitlines()[-1]

        yield run
        host.stdin.close()


def main():
    """Answer requests until there are none left."""
    sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE)]
    import crashes

    crashes.prepare()
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        for line in sys.stdin:
            sys.argv = json.loads(line)
            script = str(BENCHMARKS / f"{sys.argv[0]}.py")
            code = crashes.ended(crashes.fork(lambda script=script: runpy.run_path(script, run_name="__main__"), said))
            sys.stdout.write(json.dumps([code, said.read_text()]) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
