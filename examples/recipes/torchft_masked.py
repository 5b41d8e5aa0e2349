"""Masked averaging in torchft: a manager whose all-reduce votes, for its DiLoCo. Running it checks it.

    python examples/recipes/torchft_masked.py

Starts a lighthouse and two replicas as processes on this machine, and compares their models with the same rounds in one
process. The rounds are those of `diloco_masked.py`.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.multiprocessing as processes
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from fedgma.aggregation.masks import soft_mask

sys.path.insert(0, str(Path(__file__).parent))
from diloco_masked import ROUNDS, STEPS, TAU, alone, copied, network, outer_optimizer


# recipe
class VotingManager:
    def __init__(self, manager, tau=0.4):
        self.manager, self.mask = manager, soft_mask(tau)

    def __getattr__(self, name):
        return getattr(self.manager, name)

    def allreduce(self, tensor, should_quantize=False):
        votes = tensor.sign()
        works = [self.manager.allreduce(tensor, should_quantize), self.manager.allreduce(votes)]
        return MaskedWork(self, works, tensor, votes)


class MaskedWork:
    def __init__(self, voting, works, tensor, votes):
        self.voting, self.works, self.tensor, self.votes = voting, works, tensor, votes

    def wait(self, timeout=None):
        for work in self.works:
            work.wait()
        replicas = self.voting.manager.num_participants()
        counted = (self.votes * replicas).round().to(torch.int32)  # torchft averages
        self.tensor.mul_(self.voting.mask(counted, max(replicas, 1), "float32"))
        return True


# end of the recipe

REPLICAS = 2


def replica(number: int, lighthouse: str) -> None:
    """One replica group of one process."""
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model = network()
    manager = Manager(
        pg=ProcessGroupGloo(timedelta(seconds=60)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=REPLICAS,
        use_async_quorum=False,
        init_sync=False,
        replica_id=str(number),
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="localhost",
    )
    try:
        train(model, number, VotingManager(manager, TAU))
    finally:
        manager.shutdown()
    if number == 0:
        for name, value in alone(REPLICAS).items():
            torch.testing.assert_close(copied(model)[name], value)
        print(f"torchft: {ROUNDS} rounds of {REPLICAS} replicas, equal to fedgma.masked_mean", flush=True)


def train(model: torch.nn.Module, number: int, manager: VotingManager) -> None:
    """The rounds of `diloco_masked.py`: DiLoCo synchronises by itself after every STEPS steps."""
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    with DiLoCo(manager, [model], inner, outer_optimizer(model), sync_every=STEPS):
        for round in range(ROUNDS):
            inner.state.clear()
            generator = torch.Generator().manual_seed(100 * number + round)
            x, y = torch.randn(16, 4, generator=generator), torch.randint(2, (16,), generator=generator)
            for _ in range(STEPS):
                inner.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                inner.step()


def main() -> None:
    """Start everything on this machine."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=REPLICAS, join_timeout_ms=10_000)
    try:
        processes.spawn(replica, (lighthouse.address(),), nprocs=REPLICAS)
    finally:
        lighthouse.shutdown()


if __name__ == "__main__":
    main()
