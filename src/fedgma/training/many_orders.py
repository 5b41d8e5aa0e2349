"""Batches of many clients at once: the same numbers as `batches.batch_order` draws for one, without a loop over them.

A generator of numpy costs some 20 microseconds to make, more than a GPU needs to train a small client. Here the
generators of all clients are the rows of arrays: numpy's `SeedSequence` and PCG64 (M. E. O'Neill, PCG: A Family of
Simple Fast Space-Efficient Statistically Good Algorithms for Random Number Generation, 2014), and the shuffle of
`Generator.permutation`. Where clients have more samples than that pays for, one generator of numpy is set to the state
of each client's in turn. Before its first use the result is compared with numpy's; where a version of numpy draws
differently, this module is not used.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Whole = npt.NDArray[np.int64]


def _powers(first: int, factor: int, number: int) -> Words:
    """A number, and what it becomes when it is multiplied again and again, modulo 2^32."""
    return np.array([first * pow(factor, power, 1 << 32) & 0xFFFFFFFF for power in range(number)], np.uint64)


LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
MULTIPLIER = (np.uint64(0x2360ED051FC65DA4), np.uint64(0x4385DF649FCCF645))  # of PCG64, high and low
INTO_POOL = _powers(0x43B0D7E5, 0x931E8875, 17)  # of SeedSequence
OUT_OF_POOL = _powers(0x8B51F9DD, 0x58F38DED, 9)
BLOCK = 32  # numbers that all generators draw at a time
FEWEST = 20  # clients for each number drawn: with fewer, one generator after the other is as fast
SMALL = 32  # samples of a client: with more, it is as fast for any number of clients
TOGETHER = 16  # clients whose generators are seeded at once


@dataclass
class Streams:
    """PCG64, one for each client, and the 32-bit integers that were drawn so far; changed in place."""

    state: tuple[Words, Words]  # high and low halves
    step: tuple[Words, Words]  # the increment
    drawn: Words  # [draw, client]
    used: Whole  # [client]: how many of them were

    def take(self, rows: Whole) -> Words:
        """The next integer of each of these streams."""
        places = self.used[rows]
        if places.max(initial=-1) >= len(self.drawn):
            self.state, more = _integers(self.state, self.step, BLOCK)
            self.drawn = np.concatenate([self.drawn, more])
        self.used[rows] = places + 1
        return np.asarray(self.drawn[places, rows])


def batch_orders(
    samples: Sequence[np.ndarray], seeds: Words, *, epochs: int, batch: int, steps: int | None = None, least: int = 1
) -> tuple[np.ndarray, np.ndarray] | None:
    """Batches int32 [client, step, batch] and counts [client, step], given the seed of each client's generator.

    None where the numbers are not known to be numpy's, or no client has a sample.
    """
    sizes = np.array([len(indices) for indices in samples], np.int64)
    longest = int(sizes.max(initial=0))
    if not longest or not agrees_with_numpy():
        return None
    many = longest <= SMALL and len(sizes) >= FEWEST * epochs * longest
    kept = -(-sizes // batch) - ((sizes % batch > 0) & (sizes % batch < least))  # batches of an epoch
    total = epochs * kept if steps is None else np.minimum(epochs * kept, steps)
    counts = _counts(sizes, kept, total, batch)
    orders = np.zeros((*counts.shape, batch), np.int32)
    fill = _fill_together if many else _fill_in_turn
    fill(orders.reshape(len(sizes), -1), samples, seeds, [_places(sizes, kept, total, batch, e) for e in range(epochs)])
    return orders, counts


Places = list[tuple[int, int]]  # per client, the part of its row that an epoch fills


def _places(sizes: Whole, kept: Whole, total: Whole, batch: int, epoch: int) -> Places:
    first, last = (batch * np.minimum((epoch + more) * kept, total) for more in (0, 1))
    return list(zip(first.tolist(), np.minimum(first + sizes, last).tolist(), strict=True))


def _counts(sizes: Whole, kept: Whole, total: Whole, batch: int) -> np.ndarray:
    """How many samples of every batch are real [client, step]; `kept` [client] batches make an epoch."""
    step = np.arange(int(total.max()))
    left = sizes[:, None] - step % np.maximum(kept, 1)[:, None] * batch
    return np.where(step < total[:, None], np.minimum(left, batch), 0)


def _fill_together(rows: np.ndarray, samples: Sequence[np.ndarray], seeds: Words, epochs: Sequence[Places]) -> None:
    """Write the samples of all clients in the order of each epoch."""
    sizes = np.array([len(indices) for indices in samples], np.int64)
    firsts, together = np.cumsum(sizes) - sizes, np.concatenate(samples)
    for order, places in zip(permutations(seeds, sizes, len(epochs)), epochs, strict=True):
        drawn = together[np.minimum(firsts[:, None] + order.T, len(together) - 1)]  # padded after the last sample
        for row, own, (first, last) in zip(rows, drawn, places, strict=True):
            row[first:last] = own[: last - first]


def _fill_in_turn(rows: np.ndarray, samples: Sequence[np.ndarray], seeds: Words, epochs: Sequence[Places]) -> None:
    """The same by numpy's own shuffle."""
    for row, indices, source, *places in zip(rows, samples, generators(seeds), *epochs, strict=True):
        for first, last in places:
            row[first:last] = source.permutation(indices)[: last - first]


def generators(seeds: Words) -> Iterator[np.random.Generator]:
    """`default_rng(seed)` of every seed; each is to be used before the next is asked for.

    >>> [int(source.integers(100)) for source in generators(np.arange(40, dtype=np.uint64))][3]
    81
    """
    if len(seeds) < TOGETHER or not agrees_with_numpy():
        return map(np.random.default_rng, seeds.tolist())
    return _reseeded(seeds)


def _reseeded(seeds: Words) -> Iterator[np.random.Generator]:
    """The same as one generator, which is set to the state of each in turn."""
    streams, source = _seeded(seeds), np.random.Generator(np.random.PCG64(0))
    words = (part.tolist() for part in (*streams.state, *streams.step))
    for high, low, step_high, step_low in zip(*words, strict=True):
        state = {"state": high << 64 | low, "inc": step_high << 64 | step_low}
        source.bit_generator.state = {"bit_generator": "PCG64", "state": state, "has_uint32": 0, "uinteger": 0}
        yield source


def permutations(seeds: Words, sizes: Whole, times: int) -> list[Whole]:
    """`times` shuffles [place, client] of range(size), as `default_rng(seed).permutation` draws one after the other."""
    longest, clients = int(sizes.max()), np.arange(len(sizes))
    streams = _seeded(seeds)
    shuffles = []
    for _ in range(times):
        order = np.repeat(np.arange(longest)[:, None], len(sizes), 1)
        for last in range(longest - 1, 0, -1):
            rows = clients[sizes > last] if sizes.min() <= last else clients
            place = _bounded(streams, rows, last)
            order[last, rows], order[place, rows] = order[place, rows], order[last, rows].copy()
        shuffles.append(order)
    return shuffles


def _bounded(streams: Streams, rows: Whole, last: int) -> Whole:
    """Integers from 0 to `last` for these clients: as many bits as `last` has, drawn until they are not above it."""
    mask = np.uint64((1 << last.bit_length()) - 1)
    place = streams.take(rows) & mask
    while len(again := np.flatnonzero(place > last)):
        place[again] = streams.take(rows[again]) & mask
    return place.astype(np.int64)


def _seeded(seeds: Words) -> Streams:
    """PCG64 as `default_rng` seeds it."""
    high, low, step_high, step_low = _seed_words(seeds)
    step = ((step_high << np.uint64(1)) | (step_low >> np.uint64(63)), (step_low << np.uint64(1)) | np.uint64(1))
    begun = _sum(step, (high, low))  # a step from the state 0, plus the seed
    none = np.empty((0, len(seeds)), np.uint64)
    return Streams(_advanced(begun, step), step, none, np.zeros(len(seeds), np.int64))


def _seed_words(seeds: Words) -> Words:
    """The four words [word, client] of `SeedSequence(seed).generate_state(4, np.uint64)`."""
    zero = np.zeros_like(seeds)
    pool = _hashed(np.stack([seeds & LOW, seeds >> HALF, zero, zero]), INTO_POOL[:5])
    for source in range(4):
        others = [target for target in range(4) if target != source]
        spread = _hashed(pool[source], INTO_POOL[4 + 3 * source : 8 + 3 * source])
        mixed = (pool[others] * np.uint64(0xCA01F9DD) - spread * np.uint64(0x4973F715)) & LOW
        pool[others] = mixed ^ (mixed >> np.uint64(16))
    words = _hashed(np.concatenate([pool, pool]), OUT_OF_POOL)
    return np.asarray(words[0::2] | (words[1::2] << HALF))


def _hashed(values: Words, constants: Words) -> Words:
    """A hash of each row, with a constant of its own and the next one."""
    values = (values ^ constants[:-1, None]) * constants[1:, None] & LOW
    return np.asarray(values ^ (values >> np.uint64(16)))


def _integers(state: tuple[Words, Words], step: tuple[Words, Words], number: int) -> tuple[tuple[Words, Words], Words]:
    """The state after an even number of draws, and these [draw, client]: of 64 bits the low half, then the high one."""
    drawn = np.empty((number, len(state[0])), np.uint64)
    for row in range(0, number, 2):
        state = _advanced(state, step)
        high, low = state
        mixed, turn = high ^ low, high >> np.uint64(58)
        value = np.asarray((mixed >> turn) | (mixed << (-turn & np.uint64(63))), np.uint64)
        drawn[row], drawn[row + 1] = value & LOW, value >> HALF
    return state, drawn


def _advanced(state: tuple[Words, Words], step: tuple[Words, Words]) -> tuple[Words, Words]:
    """The state times the multiplier plus the increment, modulo 2^128."""
    high, low = state
    factor_high, factor_low = MULTIPLIER
    a, b = low & LOW, low >> HALF
    c, d = factor_low & LOW, factor_low >> HALF
    cross, other = a * d, b * c
    middle = ((a * c) >> HALF) + (cross & LOW) + (other & LOW)
    carried = b * d + (cross >> HALF) + (other >> HALF) + (middle >> HALF)
    return _sum((carried + high * factor_low + low * factor_high, low * factor_low), step)


def _sum(first: tuple[Words, Words], second: tuple[Words, Words]) -> tuple[Words, Words]:
    low = first[1] + second[1]
    return first[0] + second[0] + (low < first[1]), low


@cache
def agrees_with_numpy() -> bool:
    """Whether this version of numpy draws the same permutations."""
    seeds = np.array([0, 1, 2**32 - 1, 2**32, 2**63 - 1, 6364136223846793005], np.uint64)
    sizes = np.array([1, 2, 7, 33, 64, 65], np.int64)
    shuffled = permutations(seeds, sizes, 2)
    sources = [np.random.default_rng(int(seed)) for seed in seeds]
    if any(
        drawn.bit_generator.state != np.random.PCG64(int(s)).state
        for s, drawn in zip(seeds, _reseeded(seeds), strict=True)
    ):
        return False
    return all(
        np.array_equal(shuffled[time][:size, client], sources[client].permutation(np.arange(size)))
        for time in range(2)
        for client, size in enumerate(sizes.tolist())
    )
