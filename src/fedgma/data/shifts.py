"""Feature shift: what makes the same digit look different at each client, as small tables of numbers (numpy only).

Colour is a spurious feature: every client shows a digit in its own variation of a colour that goes with that digit, and
in the test environment the colours are new and mean nothing. Rotation gives every client an angle of its own. Nothing
here touches an image; `fedgma.data.client_views` applies the tables when a batch is made.
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
GROUND = 0.5  # largest channel of a background colour, so that a digit stays readable on any of them
CANDIDATES = 4096


@dataclass(frozen=True)
class Colour:
    """Settings of the colour shift.

    `palette="shared"`: a digit has a base colour that every client varies by at most `jitter` in each channel;
    `"private"`: every client has ten colours of its own, unrelated to the others'. A client flips a share of its
    images, between `flip_low` and `flip_high`, to the colour of another digit. In the test environment colours are new
    and independent of the label (`"unseen"`), dealt to the wrong digits (`"permuted"`), or the base colours at random
    (`"random"`).
    """

    palette: str = "shared"
    coloring: str = "foreground"
    test_coloring: str = "unseen"
    jitter: float = 0.1
    flip_low: float = 0.1
    flip_high: float = 0.2
    palette_seed: int = 0

    def __post_init__(self) -> None:
        _one_of("palette", self.palette, PALETTES)
        _one_of("coloring", self.coloring, COLORINGS)
        _one_of("test_coloring", self.test_coloring, TEST_COLORINGS)
        if not 0 <= self.jitter <= 1:
            raise ConfigError(f"jitter must be between 0 and 1, not {self.jitter}")
        if not 0 <= self.flip_low <= self.flip_high <= 1:
            raise ConfigError(
                f"flips must be 0 <= flip_low <= flip_high <= 1, not {self.flip_low} and {self.flip_high}"
            )


@dataclass(frozen=True)
class Rotation:
    """Settings of the rotation shift: client angles evenly spaced in [low, high] degrees, and one unseen test angle."""

    low: float = 0.0
    high: float = 75.0
    test: float = 90.0

    def __post_init__(self) -> None:
        if not all(map(np.isfinite, (self.low, self.high, self.test))) or self.low > self.high:
            raise ConfigError(f"angles must be finite with low <= high, not {self.low}, {self.high} and {self.test}")


Shift = Colour | Rotation


class Colouring(NamedTuple):
    """Colours of each environment, and what each sample does with them.

    A sample of label y in environment e shows the colours of y, or of `other` where its `luck` is below `flip[e]`.
    """

    ink: Floats  # [environment, class, 2, rgb]
    ground: Floats  # [environment, class, 2, rgb]
    flip: Floats  # [environment]
    luck: Floats  # [sample], uniform in [0, 1)
    other: Index  # [sample]
    pick: Index  # [sample, 2]: which of its two ink and of its two ground colours a sample shows


def well_separated(count: int, seed: int) -> Floats:
    """RGB colours with largest channel 1, each as far as can be from those before it: [colour, rgb].

    >>> well_separated(3, seed=0).max(axis=1).tolist()
    [1.0, 1.0, 1.0]
    """
    candidates = _bright(generator(seed, "palette").random((CANDIDATES, 3)))
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
        drawn = [_jittered(tables, shift.jitter, rng) for rng in rngs]
    else:
        drawn = [_private_tables(shift, classes, rng) for rng in rngs]
    ink, ground = (np.stack(table) for table in zip(*drawn, strict=True))
    flip = np.array([rng.uniform(shift.flip_low, shift.flip_high) for rng in rngs], np.float32)
    rng = generator(seed, "colour", "samples", part)
    step = rng.integers(1, max(classes, 2), len(labels))  # never 0: a flipped image takes another digit's colour
    return Colouring(ink, ground, flip, *_sample_draws(rng, (labels + step) % classes))


def held_out_colouring(shift: Colour, labels: Index, classes: int, *, seed: int) -> Colouring:
    """The held-out environment: one set of colours that carries no (or the wrong) news about the label."""
    base, unseen = _base_tables(shift, classes), _base_tables(shift, classes, unseen=True)
    ink, ground = unseen if shift.test_coloring == "unseen" else base
    rng = generator(seed, "colour", "test")
    if shift.test_coloring == "permuted":
        wrong = _derangement(classes, rng)
        ink, ground, other = ink[wrong], ground[wrong], labels
    else:
        other = rng.integers(0, classes, len(labels))
    flip = np.ones(1, np.float32)  # every image shows the colour of `other`
    return Colouring(ink[None], ground[None], flip, *_sample_draws(rng, other))


def client_angles(shift: Rotation, clients: int) -> Floats:
    """Degrees of each client, anticlockwise.

    >>> client_angles(Rotation(), 6).tolist()
    [0.0, 15.0, 30.0, 45.0, 60.0, 75.0]
    """
    return np.linspace(shift.low, shift.high, clients, dtype=np.float32)


def _base_tables(shift: Colour, classes: int, unseen: bool = False) -> tuple[Floats, Floats]:
    """Ink and ground colours of each class, shared by all clients; `unseen` ones come next in the same sequence."""
    each = 1 if shift.coloring == "foreground" else 2
    start = classes * each if unseen else 0
    ink = well_separated(2 * classes * each, shift.palette_seed)[start : start + classes * each]
    ink = np.broadcast_to(ink.reshape(classes, each, 3), (classes, 2, 3))
    if shift.coloring == "foreground":
        return ink, np.zeros((classes, 2, 3), np.float32)
    ground = well_separated(4 * classes, shift.palette_seed + 1)[start : start + 2 * classes]
    return ink, GROUND * ground.reshape(classes, 2, 3)


def _private_tables(shift: Colour, classes: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    ink, ground = (_bright(rng.random((classes, 2, 3))).astype(np.float32) for _ in range(2))
    if shift.coloring == "foreground":
        return np.repeat(ink[:, :1], 2, axis=1), np.zeros_like(ground)
    return ink, np.float32(GROUND) * ground


def _jittered(tables: tuple[Floats, Floats], jitter: float, rng: np.random.Generator) -> tuple[Floats, Floats]:
    ink, ground = (np.clip(table + rng.uniform(-jitter, jitter, table.shape), 0, 1) for table in tables)
    if not tables[1].any():  # foreground only: one ink colour a class, and the ground stays black
        ink, ground = np.repeat(ink[:, :1], 2, axis=1), np.zeros_like(ground)
    return ink.astype(np.float32), ground.astype(np.float32)


def _sample_draws(rng: np.random.Generator, other: Index) -> tuple[Floats, Index, Index]:
    return rng.random(len(other), np.float32), other.astype(np.int64), rng.integers(0, 2, (len(other), 2))


def _derangement(count: int, rng: np.random.Generator) -> Index:
    """A permutation that leaves nothing in its place: a cycle through everything in random order."""
    cycle = rng.permutation(count)
    wrong = np.empty(count, np.int64)
    wrong[cycle] = np.roll(cycle, 1)
    return wrong


def _bright(colours: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    bright: npt.NDArray[np.float64] = colours / colours.max(axis=-1, keepdims=True)
    return bright


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"unknown {name} {value!r}; known: {', '.join(known)}")
