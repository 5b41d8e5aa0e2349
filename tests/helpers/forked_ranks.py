"""Two ranks of one `fedgma` command, forked from a process that has imported everything: much faster than two starts.

python forked_ranks.py STORE WORDS...
"""

import os
import sys

import torch

from fedgma.cli.app import run_app
from fedgma.experiments import play  # noqa: F401  before the fork
from fedgma.experiments.ranks import agreement, rendezvous  # noqa: F401
from fedgma.experiments.ranks.launch import LOOPBACK
from fedgma.experiments.ranks.places import STORE


def main(store: str, *words: str) -> int:
    """Run the command with these words as two ranks that meet at `store`; 0 if both succeed."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # brings in a third of torch
    child = os.fork()
    rank = "0" if child else "1"
    os.environ |= {"RANK": rank, "WORLD_SIZE": "2", STORE: store, "GLOO_SOCKET_IFNAME": LOOPBACK}
    sys.argv = ["fedgma", *words]
    code = 0
    try:
        run_app()
    except SystemExit as end:
        code = end.code or 0
    if not child:
        os._exit(code)
    return code or os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
