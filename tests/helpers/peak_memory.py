"""How much memory an action takes."""

import tracemalloc


def peak(action):
    """The most bytes that an action takes."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
