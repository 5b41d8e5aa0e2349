"""The sides that `bench_parts.py` compares: what each prepares, and the call that is timed.

A side is one way to do a piece of work, with or without a hand-written part. `prepare` makes everything ready, compiled
code included, and gives the call to time and a result [row, entry] to compare with that of the other side.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from workloads import BOUND, WORKLOADS, fleet_specs, lane_updates, make_images

from fedgma.aggregation import kernels
from fedgma.aggregation.kernels import plain
from fedgma.aggregation.masks import soft_mask
from fedgma.simulation.fleet import Fleet, assemble, play_round, start
from fedgma.training.choose import written_form
from fedgma.training.compile import compiled
from fedgma.training.cuda_graphs import Engine, float32_precision
from fedgma.training.evaluation import sample_scores
from fedgma.training.fast import gpu, resnet18, torch_ops
from fedgma.training.fast.written import form_gradients
from fedgma.training.gradients import multiplied
from fedgma.training.stacked import unflatten

ENTRIES = 5000  # of each row of a result, at most, that are compared
STEPS = 2  # local steps after which updates are compared: rounding grows with every step


class Ready(NamedTuple):
    """A side that can be timed."""

    call: Callable[[], object]
    result: np.ndarray  # [row, entry]


@dataclass(frozen=True)
class Rounds:
    """Whole rounds of a fleet: draws, copies, local training, tally, mask and server step."""

    work: str
    runs: int = 1
    precision: str = "fp32"
    trainer: str = "engine"
    form: bool = True
    without: tuple[str, ...] = ()  # GPU kernels that are not used
    change: str = ""  # one of CHANGES
    compiled: bool = True  # the first rounds of a run are not

    @property
    def bound(self) -> float:
        """The largest distance of two sides that rounding explains."""
        return BOUND[self.precision]

    def prepare(self, device: str, tiny: bool) -> Ready:
        gpu.KERNELS = tuple(name for name in gpu.KERNELS if name not in self.without)
        fleet = fleet_of(self.work, self.runs, device, tiny, **self.options())
        if self.change:
            fleet = replace(fleet, train=CHANGES[self.change](fleet))
        first = start(fleet)
        state, _ = play_round(fleet, first)

        def call() -> None:
            nonlocal state
            state, _ = play_round(fleet, state)

        return Ready(call, sampled(lane_updates(fleet, first, STEPS)))

    def options(self) -> dict[str, Any]:
        after = 0 if self.compiled else 10**9
        return {"trainer": self.trainer, "precision": self.precision, "form": self.form, "compile_after": after}


def fleet_of(name: str, runs: int, device: str, tiny: bool, **options: Any) -> Fleet:
    """A fleet of so many runs of a workload; `tiny` is small enough for a CPU without kernels."""
    work = WORKLOADS[name]
    if tiny:
        side = 32 if name.endswith("imagenet") else 16
        small = {"shape": (work.shape[0], side, side)} if name.startswith("resnet") else {}
        work = replace(work, clients=4, clients_per_round=2, batch=4, samples=12, **small)
    specs = fleet_specs(work, make_images(work, device), min(runs, 2) if tiny else runs)
    return assemble(specs, **options)


def _multiplied_out(fleet: Fleet) -> Engine:
    """The engine of the model's written form, with the weight gradients of dense layers as plain tensors."""
    form = written_form(fleet.model)
    gradients = form_gradients(form, fleet.precision)
    return Engine(
        multiplied_out(gradients),
        padding=True,
        precision=fleet.precision,
        compile=fleet.device.type == "cuda",
    )


def multiplied_out(gradients: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient function with the weight gradients of dense layers as plain tensors."""

    def call(*arguments: Any) -> Any:
        grads, *rest = gradients(*arguments)
        return (multiplied(grads), *rest)

    return call


def _one_stream(fleet: Fleet) -> Any:
    torch_ops.STREAMS = 1
    return fleet.train


def _torch_order(fleet: Fleet) -> Any:
    """Weights in the order of torch."""
    fleet.train.order = None
    return fleet.train


def _one_call_a_lane(fleet: Fleet) -> Engine:
    resnet18.TOGETHER = resnet18.BY_LANE
    resnet18.residual_form.cache_clear()
    gradients = form_gradients(written_form(fleet.model), fleet.precision)
    return Engine(gradients, padding=True, precision=fleet.precision, compile=fleet.device.type == "cuda")


def _thread_by_thread(fleet: Fleet) -> Any:
    """Sums of threads one by one."""
    gpu.kernels("conv_thread").FOLDED = False
    return fleet.train


CHANGES = {
    "thread by thread": _thread_by_thread,
    "multiplied out": _multiplied_out,
    "one stream": _one_stream,
    "torch's order": _torch_order,
    "one call a lane": _one_call_a_lane,
}


@dataclass(frozen=True)
class Scores:
    """The evaluation of all runs of a fleet on the test images."""

    work: str
    runs: int = 1
    form: bool = True
    bound = 1e-3

    def prepare(self, device: str, tiny: bool) -> Ready:
        options = {
            "trainer": "engine",
            "form": self.form,
            "compile_after": 0,
            "budget": 2**34,
        }  # less than all, so that others fit beside it
        fleet = fleet_of(self.work, self.runs, device, tiny, **options)
        state, pool = start(fleet), fleet.specs[0].federation.test
        params, index = unflatten(state.params, fleet.shapes), torch.arange(200 if tiny else len(pool.y), device=device)

        def call() -> torch.Tensor:
            with float32_precision("fp32"):
                return sample_scores(fleet.score, params, state.buffers, pool, index, batch=fleet.eval_batch)[0]

        return Ready(call, sampled(call()))


@dataclass(frozen=True)
class Tally:
    """Ten updates of each run added to the sums of their runs, on the device."""

    runs: int
    entries: int
    way: str  # fused, torch, or compiled
    clients: int = 10
    bound = 1e-12

    def prepare(self, device: str, tiny: bool) -> Ready:
        size = 1000 if tiny else self.entries
        draw = torch.Generator(device).manual_seed(0)
        updates = torch.randn((self.runs * self.clients, size), generator=draw, device=device)
        weights = torch.arange(1, len(updates) + 1, dtype=torch.float64, device=device)
        sums = [torch.zeros((self.runs, size), dtype=kind, device=device) for kind in (torch.float64, torch.float32)]
        votes = torch.zeros((self.runs, size), dtype=torch.int32, device=device)
        edges = torch.arange(0, len(updates) + 1, self.clients, device=device)
        if self.way == "fused":
            call = partial(kernels.load_gpu_kernels().add_runs, plain.Sums(*sums, votes), updates, weights, None, edges)
        else:
            add = compiled(add_runs) if self.way == "compiled" else add_runs
            call = partial(add, *sums, votes, updates.view(self.runs, self.clients, size), weights.view(self.runs, -1))
        call()
        return Ready(call, sampled(torch.cat([sums[0] + sums[1], votes.double()])))


def add_runs(total, rest, votes, updates, weights) -> None:
    """The tally in plain torch, batched over runs: updates [run, client, entry]."""
    for client in range(updates.shape[1]):
        update = updates[:, client]
        after, lost = plain.two_sum(total, update.double() * weights[:, client, None])
        total.copy_(after)
        rest.add_(lost)
        votes.add_((update > 0).to(torch.int32) - (update < 0).to(torch.int32))


@dataclass(frozen=True)
class Stack:
    """Mean and mask of a stack of updates on the device."""

    clients: int
    entries: int
    way: str  # fused, torch, or compiled
    bound = 1e-5

    def prepare(self, device: str, tiny: bool) -> Ready:
        draw = torch.Generator(device).manual_seed(0)
        size = 1000 if tiny else self.entries
        updates = torch.randn((self.clients, size), generator=draw, device=device)
        weights = np.arange(1.0, self.clients + 1)
        if self.way == "fused":
            call = partial(kernels.load_gpu_kernels().aggregate, [updates], weights, weights.sum(), soft_mask(0.4))
            (mean,), (mask,), _ = call()
        else:
            share = torch.tensor(weights / weights.sum(), dtype=torch.float32, device=device)
            call = partial(compiled(masked_mean) if self.way == "compiled" else masked_mean, updates, share)
            mean, mask = call()
        return Ready(call, sampled(torch.stack([mean, mask])))


def masked_mean(updates, share) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and mask in plain torch."""
    mean = (share[:, None] * updates).sum(0)
    agreement = torch.sign(updates).mean(0).abs()
    return mean, torch.where(agreement >= 0.4, 1.0, agreement)


@dataclass(frozen=True)
class HostTally:
    """Updates in main memory added to their sums: by the compiled loops, or by numpy."""

    clients: int
    entries: int
    way: str  # numba or numpy
    bound = 0.0

    def prepare(self, device: str, tiny: bool) -> Ready:
        size = 1000 if tiny else self.entries
        updates = np.random.default_rng(0).standard_normal((self.clients, size), dtype=np.float32)
        sums, weights = plain.empty_sums(size, "float32", self.clients, True, updates), np.arange(1.0, self.clients + 1)
        if self.way == "numba":
            if kernels.load_cpu_kernels() is None:
                raise RuntimeError("numba is not installed")
            call = partial(kernels.load_cpu_kernels().add_rows, sums, updates, weights)
        else:
            call = partial(plain.add_rows, sums, updates, weights)
        call()
        return Ready(call, sampled(torch.from_numpy(np.stack([sums.total + sums.rest, sums.votes]))))


def sampled(result: torch.Tensor) -> np.ndarray:
    """Some entries of every row, on the host."""
    step = -(-result.shape[1] // ENTRIES)
    return result[:, ::step].double().cpu().numpy()


Side = Rounds | Scores | Tally | Stack | HostTally
