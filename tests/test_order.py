"""Long tests begin the parts that workers get, and no test is lost."""

import pytest

from order import ordered

LONG = {3: 60, 7: 25, 8: 20, 2: 10}


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_every_worker_begins_with_its_share_of_the_long_tests(workers):
    items = list(range(21))
    found = ordered(items, lambda item: LONG.get(item, 0), workers)
    assert sorted(found) == items
    assert [item for item in found if item not in LONG] == [item for item in items if item not in LONG]
    sizes = [(place + 1) * 21 // workers - place * 21 // workers for place in range(workers)]  # as they are handed out
    starts = [sum(sizes[:place]) for place in range(min(workers, len(LONG)))]
    assert [found[start] for start in starts] == [3, 7, 8, 2][: len(starts)]


def test_the_longest_goes_to_the_worker_with_the_least_to_do():
    assert ordered(list(range(10)), lambda item: LONG.get(item, 0), 2) == [3, 0, 1, 4, 5, 7, 8, 2, 6, 9]


def test_more_long_tests_than_a_part_holds_are_all_kept():
    assert sorted(ordered([1, 2, 3], lambda item: item, 5)) == [1, 2, 3]
