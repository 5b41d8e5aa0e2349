"""One user at a time, and changes that end: what keeps a tally whole among threads and interruptions."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from fedgma.errors import DataError


class Turns:
    """Threads that use one thing take turns; a change of it that did not end makes every later use an error."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._half_done = False  # a change has begun and not ended

    @contextmanager
    def use(self) -> Iterator[None]:
        """Have the thing to oneself; raises `DataError` if an earlier change of it was interrupted."""
        with self._lock:
            self._check_whole()
            yield

    def begin(self) -> None:
        """Begin a change; if it is interrupted (Ctrl-C, no memory) before `end`, every later `use` raises."""
        self._half_done = True

    def end(self) -> None:
        """End a change: the thing is whole again."""
        self._half_done = False

    def _check_whole(self) -> None:
        if self._half_done:
            raise DataError(
                "a change of this tally was interrupted, so a client is counted in part; make a new tally and add the "
                "round's updates again"
            )

    def __getstate__(self) -> dict[str, Any]:
        self._check_whole()
        return {}  # a lock is not copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._lock, self._half_done = threading.RLock(), False


class Shared:
    """What threads share: any copy of it waits for its turn, and has nothing in common with it afterwards."""

    turns: Turns

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        with self.turns.use():
            twin = object.__new__(type(self))
            memo[id(self)] = twin
            vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def __copy__(self) -> Self:
        return copy.deepcopy(self)  # of two that share arrays, one would change the other's sums
