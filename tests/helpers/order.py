"""The order of the tests: each worker begins with its share of the long ones."""

from itertools import islice


def ordered(items, seconds, workers):
    """The items in an order of which pytest-xdist (worksteal) hands consecutive parts of equal size to the workers.

    `seconds(item)` is about how long an item takes if it is long, else 0. A long one that began late would keep its
    worker busy while the others have nothing left to do.
    """
    shares = [[] for _ in range(workers)]
    for item in sorted((item for item in items if seconds(item)), key=seconds, reverse=True):
        min(shares, key=lambda share: sum(map(seconds, share))).append(item)
    others, left = iter([item for item in items if not seconds(item)]), len(items)
    for place, share in enumerate(shares):
        size = left // (workers - place)
        share += islice(others, max(0, size - len(share)))
        left -= size
    return [item for share in shares for item in share] + list(others)
