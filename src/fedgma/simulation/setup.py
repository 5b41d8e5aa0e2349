"""What is the same in every round of a fleet."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedgma.data.pools import Pool
from fedgma.simulation import timeline
from fedgma.simulation.batched import adapters, attacks, carried, norm_bounds, optimizers, rules, votes
from fedgma.simulation.server_part import ServerPart
from fedgma.simulation.spec import RunSpec
from fedgma.training.evaluation import Scorer
from fedgma.training.lane_batch import LaneBatch, LocalTrainer
from fedgma.training.ranks import ALONE, Ranks
from fedgma.training.stacked import Shapes
from fedgma.training.task import Columns, Task


class Plan(NamedTuple):
    """What a round of a fleet draws."""

    sampled: dict[int, np.ndarray]  # clients of each run
    lanes: np.ndarray  # int64 [lane, 3]: run, client, round
    laid: tuple[LaneBatch, np.ndarray] | None = None  # batches and weights of all lanes, where they are drawn already


@dataclass(frozen=True, eq=False)
class Fleet:
    """What is the same in every round: runs, model, trainer, tables on the device."""

    specs: tuple[RunSpec, ...]
    model: nn.Module
    shapes: Shapes  # of the trainable parameters, in order
    frozen: frozenset[str]  # names of the others, which stay as they are
    space: adapters.Space | None  # None: rules see the parameters themselves
    seen: Shapes  # what rules and server optimisers see
    train: LocalTrainer
    early: LocalTrainer  # of the first rounds, in which nothing is compiled
    score: Scorer
    early_score: Scorer  # for one run the module itself: no kernels to wait for
    compile_after: int  # how many those are; 0 where nothing is ever compiled
    task: Task
    columns: Columns  # of the task's measures
    precision: str
    pools: tuple[Pool, ...]  # distinct training pools
    pool: np.ndarray  # [run], position in `pools`
    rates: np.ndarray  # of local training, float32 [run, rate]
    tests: tuple[dict[str, Pool], ...]  # per run, by name; equal pools are one object
    optimizers: optimizers.Optimizers
    rules: rules.Rules
    bounds: norm_bounds.Bounds | None  # None: no run bounds the norm of updates
    attackers: attacks.Attackers | None
    algorithms: carried.Algorithms | None  # None: no run's algorithm carries anything from round to round
    clocks: tuple[timeline.RunClock | None, ...]  # per run; None: its rounds have no duration
    layers: votes.Layers
    server: ServerPart | None  # all that follows training in a round; None where there is more
    client_tests: tuple[Tensor | None, ...]  # per run [client, sample] into its test pool, -1 is none
    chunk: int  # lanes trained at a time
    eval_batch: int
    device: torch.device
    ranks: Ranks = ALONE  # processes over which lanes are shared out
    plans: dict[bytes, Plan] = field(default_factory=dict, init=False)  # drawn ahead, by the rounds before them
