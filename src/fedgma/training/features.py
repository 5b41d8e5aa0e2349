"""Which terms of a step the lanes of a batch need; the others are left out of the step."""

from typing import NamedTuple

import numpy as np

from fedgma.training.lane_batch import RATES, Assignment

UNUSED = np.array([{"scale": 1, "clip": np.inf}.get(name, 0) for name in RATES], np.float32)  # rates without effect


class Features(NamedTuple):
    """The terms of a step that at least one lane of the batch needs; the others are left out of the step."""

    momentum: bool
    prox: bool
    clip: bool
    scale: bool
    correction: bool
    second: bool  # gradients at a perturbed point
    tilt: bool
    decay: bool
    nesterov: bool
    adamw: bool
    schedule: bool  # rates that change within a round

    @property
    def plain(self) -> bool:
        """Whether a step is the gradient times the rate, and nothing else."""
        return not any(self._replace(schedule=False))

    @property
    def light(self) -> bool:
        """Whether a step is that of SGD with or without momentum, and nothing else."""
        return not any(self._replace(schedule=False, momentum=False))


def features_of(assignment: Assignment) -> Features:
    """The features that the hyper-parameters of these lanes need."""
    lane_batch = assignment.lane_batch
    by_sgd = lane_batch.optimizer == "sgd"
    used = dict(zip(RATES, (lane_batch.rates != UNUSED).any(0).tolist(), strict=True))
    return Features(
        momentum=by_sgd and used["momentum"],
        prox=used["mu"],
        clip=used["clip"],
        scale=used["scale"],
        correction=bool(assignment.correction),
        second=used["blend"],
        tilt=assignment.tilt is not None,
        decay=used["weight_decay"],
        nesterov=by_sgd and used["nesterov"],
        adamw=not by_sgd,
        schedule=bool((lane_batch.lr != lane_batch.lr[:, :1]).any()),
    )
