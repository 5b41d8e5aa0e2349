"""Feature shift: tables of colours and angles by which the same digit looks different at each client (numpy only).

Colour is a spurious feature: each digit has a colour, which every client varies a little; in the test environment the
colours are new and say nothing about the digit. Rotation gives every client its own angle. This module only draws the
tables; `fedgma.data.client_views` applies them when a batch is made.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedgma.errors import ConfigError
from fedgma.seeds import generator

Floats = npt.NDArray[np.float32]
Index = npt.NDArray[np.int64]

PALETTES = ("shared", "private")
COLORINGS = ("foreground", "foreground_background")
TEST_COLORINGS = ("unseen", "permuted", "random")
BACKGROUND = 0.5  # largest channel of a background colour, so that digits stay readable
CANDIDATES = 4096  # colours from which distinct ones are chosen


@dataclass(frozen=True)
class Colour:
    """Settings of the colour shift.

    `palette="shared"`: each digit has a base colour, and each client varies it by at most `jitter` per channel.
    `palette="private"`: each client has its own ten colours, unrelated to those of other clients. Each client shows a
    share of its images, between `flip_low` and `flip_high`, in the colour of another digit. In the test environment,
    colours are new and independent of the label (`"unseen"`), base colours assigned to wrong digits (`"permuted"`), or
    base colours independent of the label (`"random"`).
    """

    palette: str = "shared"
    coloring: str = "foreground"
    test_coloring: str = "unseen"
    jitter: float = 0.1
    flip_low: float = 0.1
    flip_high: float = 0.2
    palette_seed: int = 0

    def __post_init__(self) -> None:
        _check_choice("palette", self.palette, PALETTES)
        _check_choice("coloring", self.coloring, COLORINGS)
        _check_choice("test_coloring", self.test_coloring, TEST_COLORINGS)
        if not 0 <= self.jitter <= 1:
            raise ConfigError(f"jitter must be between 0 and 1, got {self.jitter}")
        if not 0 <= self.flip_low <= self.flip_high <= 1:
            raise ConfigError(
                f"flips must be 0 <= flip_low <= flip_high <= 1, got {self.flip_low} and {self.flip_high}"
            )


@dataclass(frozen=True)
class Rotation:
    """Settings of the rotation shift: client angles evenly spaced in [low, high] degrees, and one unseen test angle."""

    low: float = 0.0
    high: float = 75.0
    test: float = 90.0

    def __post_init__(self) -> None:
        if not all(map(np.isfinite, (self.low, self.high, self.test))) or self.low > self.high:
            raise ConfigError(f"angles must be finite with low <= high, got {self.low}, {self.high} and {self.test}")


Shift = Colour | Rotation


class Colouring(NamedTuple):
    """Colours of each environment, and the draws that choose among them for each sample.

    A sample of label y in environment e has the colours of y, or those of `other` if its `uniform` is below `flip[e]`.
    """

    foreground: Floats  # [environment, class, 2, rgb]
    background: Floats  # [environment, class, 2, rgb]
    flip: Floats  # [environment]
    uniform: Floats  # [sample], drawn uniformly from [0, 1)
    other: Index  # [sample]
    pick: Index  # [sample, 2]: which of its two foreground and two background colours a sample has


def distinct_colours(count: int, seed: int) -> Floats:
    """RGB colours with largest channel 1, each chosen as far as possible from those before it: [colour, rgb].

    >>> distinct_colours(3, seed=0).max(axis=1).tolist()
    [1.0, 1.0, 1.0]
    """
    candidates = _brighten(generator(seed, "palette").random((CANDIDATES, 3)))
    chosen = [0]
    distance = np.full(CANDIDATES, np.inf)
    for _ in range(count - 1):
        distance = np.minimum(distance, np.linalg.norm(candidates - candidates[chosen[-1]], axis=1))
        chosen.append(int(distance.argmax()))
    return candidates[chosen].astype(np.float32)


def client_colouring(shift: Colour, labels: Index, clients: int, classes: int, *, seed: int, part: str) -> Colouring:
    """The training clients' environments, and the draws of one split (`part`) seen in them."""
    rngs = [generator(seed, "colour", "client", n) for n in range(clients)]
    if shift.palette == "shared":
        tables = _base_tables(shift, classes)
        palettes = [_jitter(tables, shift.jitter, rng) for rng in rngs]
    else:
        palettes = [_private_tables(shift, classes, rng) for rng in rngs]
    foreground, background = (np.stack(table) for table in zip(*palettes, strict=True))
    flip = np.array([rng.uniform(shift.flip_low, shift.flip_high) for rng in rngs], np.float32)
    rng = generator(seed, "colour", "samples", part)
    step = rng.integers(1, max(classes, 2), len(labels))  # never 0: a flipped image gets the colour of another digit
    return Colouring(foreground, background, flip, *_sample_draws(rng, (labels + step) % classes))


def held_out_colouring(shift: Colour, labels: Index, classes: int, *, seed: int) -> Colouring:
    """The held-out environment: colours that are independent of the label, or belong to another label."""
    base, unseen = _base_tables(shift, classes), _base_tables(shift, classes, unseen=True)
    foreground, background = unseen if shift.test_coloring == "unseen" else base
    rng = generator(seed, "colour", "test")
    if shift.test_coloring == "permuted":
        permutation = _derangement(classes, rng)
        foreground, background, other = foreground[permutation], background[permutation], labels
    else:
        other = rng.integers(0, classes, len(labels))
    flip = np.ones(1, np.float32)  # every image shows the colour of `other`
    return Colouring(foreground[None], background[None], flip, *_sample_draws(rng, other))


def client_angles(shift: Rotation, clients: int) -> Floats:
    """Degrees of each client, anticlockwise.

    >>> client_angles(Rotation(), 6).tolist()
    [0.0, 15.0, 30.0, 45.0, 60.0, 75.0]
    """
    return np.linspace(shift.low, shift.high, clients, dtype=np.float32)


def _base_tables(shift: Colour, classes: int, unseen: bool = False) -> tuple[Floats, Floats]:
    """Foreground and background colours of each class, the same for all clients; `unseen` gives the test colours."""
    each = 1 if shift.coloring == "foreground" else 2
    start = classes * each if unseen else 0
    foreground = distinct_colours(2 * classes * each, shift.palette_seed)[start : start + classes * each]
    foreground = np.broadcast_to(foreground.reshape(classes, each, 3), (classes, 2, 3))
    if shift.coloring == "foreground":
        return foreground, np.zeros((classes, 2, 3), np.float32)
    background = distinct_colours(4 * classes, shift.palette_seed + 1)[start : start + 2 * classes]
    return foreground, BACKGROUND * background.reshape(classes, 2, 3)


def _private_tables(shift: Colour, classes: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    foreground, background = (_brighten(rng.random((classes, 2, 3))).astype(np.float32) for _ in range(2))
    if shift.coloring == "foreground":
        return np.repeat(foreground[:, :1], 2, axis=1), np.zeros_like(background)
    return foreground, np.float32(BACKGROUND) * background


def _jitter(tables: tuple[Floats, Floats], jitter: float, rng: np.random.Generator) -> tuple[Floats, Floats]:
    foreground, background = (np.clip(table + rng.uniform(-jitter, jitter, table.shape), 0, 1) for table in tables)
    if not tables[1].any():  # coloring="foreground": one colour per class on a black background
        foreground, background = np.repeat(foreground[:, :1], 2, axis=1), np.zeros_like(background)
    return foreground.astype(np.float32), background.astype(np.float32)


def _sample_draws(rng: np.random.Generator, other: Index) -> tuple[Floats, Index, Index]:
    return rng.random(len(other), np.float32), other.astype(np.int64), rng.integers(0, 2, (len(other), 2))


def _derangement(count: int, rng: np.random.Generator) -> Index:
    """A permutation without fixed points: a random cycle through all elements."""
    cycle = rng.permutation(count)
    permutation = np.empty(count, np.int64)
    permutation[cycle] = np.roll(cycle, 1)
    return permutation


def _brighten(colours: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    bright: npt.NDArray[np.float64] = colours / colours.max(axis=-1, keepdims=True)
    return bright


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"unknown {name} {value!r}; known: {', '.join(known)}")
