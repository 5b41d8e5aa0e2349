"""Launch a compiled kernel again without triton's look at its arguments.

At each launch triton reads type and alignment of every argument, to find what it has compiled for them. Here the same
kernel gets tensors of the same types each time, so what the first launch found is launched again, with addresses.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

LOG = logging.getLogger(__name__)
ALIGNED = 16  # bytes: triton compiles for addresses that are multiples of it, and again for others


class Launcher:
    """One kernel with fixed arguments; the tensors of a launch come before these, with the same types each time.

    Where triton does not allow a launch of what it has compiled, or not like this, it launches as always.
    """

    def __init__(
        self, kernel: Any, programs: int, fixed: tuple[Any, ...], constants: dict[str, Any], options: dict[str, Any]
    ) -> None:
        self.kernel, self.programs, self.fixed = kernel, programs, fixed
        self.constants, self.options = constants, options
        self.direct = True  # until a launch without triton's look fails
        self._again: Callable[..., None] | None = None
        self._places = (*(_place(value) for value in fixed), *constants.values())  # in the order of the parameters

    def __call__(self, *tensors: Any) -> None:
        """Launch, by triton the first time and for tensors that are not aligned."""
        places = [tensor.data_ptr() for tensor in tensors]
        aligned = not [place for place in places if place % ALIGNED]
        if aligned and self._again is not None:
            try:
                return self._again(*places, *self._places)
            except Exception as error:  # whatever another version of triton makes of it
                self._give_up(error)
        compiled = self.kernel[(self.programs,)](*tensors, *self.fixed, **self.constants, **self.options)
        if aligned and self.direct:
            try:
                self._again = compiled[(self.programs, 1, 1)]
            except Exception as error:  # triton's interpreter compiles nothing
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._again, self.direct = None, False
        LOG.debug("triton launches this kernel each time, since a direct launch failed: %r", error)


def _place(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value
