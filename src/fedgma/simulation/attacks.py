"""Malicious clients: what they send in place of their updates, as pure functions of what they know in a round.

    sign_flip      its own update, reversed and scaled
    noise          Gaussian noise, `scale` times as long as its own update
    zero           nothing: a free rider, whose zeros lower the agreement of all entries
    same_value     one value for all entries; the update is `scale` times as long as its own
    label_flip     an update trained on reversed labels (`data.poison`), scaled
    backdoor       an update trained on images with a trigger (`data.poison`), scaled
    alie           "a little is enough" (Baruch et al. 2019): the honest mean minus `scale` standard deviations
    inner_product  inner-product manipulation (Xie et al. 2020): the honest mean, reversed and scaled
    mimic          a copy of the first honest client's update (Karimireddy et al. 2022), scaled
    sybil          all attackers send one reversed update: many identities, one vote
    mask_aware     knows the rule: votes against the honest mean everywhere, and puts its length where the mask is 1

Attackers train as everybody does and know the updates of all sampled clients. `ATTACKS` is the only list of attacks.
This module imports no torch: it calls methods of the tensors that it is given.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedgma.errors import ConfigError
from fedgma.seeds import generator

if TYPE_CHECKING:
    from torch import Tensor

WHISPER = 1e-6  # length of a vote that is not to move the mean


class Known(NamedTuple):
    """What the attackers of one run know in a round."""

    own: "Tensor"  # [attacker, entry]: their updates as trained
    honest: "Tensor"  # [client, entry]: the updates of all others
    needed: int = 0  # the smallest |votes| that the rule's mask passes; 0 without such a mask
    noise: "Callable[[], Tensor] | None" = None  # standard normal numbers [attacker, entry]


Send = Callable[[Known, float], "Tensor"]  # (known, scale) -> updates sent [attacker, entry]


@dataclass(frozen=True)
class AttackRow:
    """An attack of the library: what is sent, the default of `scale`, and whether training data are changed too."""

    send: Send
    scale: float = 1.0
    poisons: bool = False


def reversed_own(known: Known, scale: float) -> "Tensor":
    """The attacker's own update, reversed."""
    return -scale * known.own


def scaled_own(known: Known, scale: float) -> "Tensor":
    """The attacker's own update; poisoned data make it harmful."""
    return scale * known.own


def gaussian_noise(known: Known, scale: float) -> "Tensor":
    """Noise with the root mean square of the attacker's own update."""
    assert known.noise is not None
    return known.noise() * (scale * _rms(known.own)).float()


def nothing(known: Known, scale: float) -> "Tensor":
    """Zeros."""
    return known.own * 0


def one_value(known: Known, scale: float) -> "Tensor":
    """The same value for all entries: the root mean square of the attacker's own update."""
    return (scale * _rms(known.own)).float().expand_as(known.own)


def little_is_enough(known: Known, scale: float) -> "Tensor":
    """As far from the honest mean as honest clients are, in the direction that hides behind their spread."""
    honest = known.honest.double()
    return (honest.mean(0) - scale * honest.std(0, unbiased=False)).float().expand_as(known.own)


def reversed_mean(known: Known, scale: float) -> "Tensor":
    """The honest mean, reversed."""
    return (-scale * _mean(known)).float().expand_as(known.own)


def copied(known: Known, scale: float) -> "Tensor":
    """The update of one honest client, which so counts several times."""
    return (scale * known.honest[0]).expand_as(known.own)


def one_for_all(known: Known, scale: float) -> "Tensor":
    """The first attacker's update, reversed, from every attacker."""
    return (-scale * known.own[0]).expand_as(known.own)


def where_the_mask_passes(known: Known, scale: float) -> "Tensor":
    """Against the honest mean: at full length where all these votes pass the mask, as a mere vote elsewhere.

    It is `scale` times as long as the attackers' own updates are on average, so a bound on norms does not see it.
    """
    mean = _mean(known)
    votes = known.honest.sign().sum(0) - len(known.own) * mean.sign()
    push = -mean * (WHISPER + (1 - WHISPER) * (votes.abs() >= known.needed))
    wanted, length = scale * known.own.double().norm(dim=1).mean(), push.norm().clamp(min=1e-300)
    sent: Tensor = (push * (wanted / length)).float().expand_as(known.own)
    return sent


ATTACKS: dict[str, AttackRow] = {
    "sign_flip": AttackRow(reversed_own),
    "noise": AttackRow(gaussian_noise),
    "zero": AttackRow(nothing),
    "same_value": AttackRow(one_value),
    "label_flip": AttackRow(scaled_own, poisons=True),
    "backdoor": AttackRow(scaled_own, poisons=True),
    "alie": AttackRow(little_is_enough, scale=1.5),
    "inner_product": AttackRow(reversed_mean),
    "mimic": AttackRow(copied),
    "sybil": AttackRow(one_for_all),
    "mask_aware": AttackRow(where_the_mask_passes),
}


@dataclass(frozen=True)
class Attack:
    """An attack by a share of the clients; a `scale` of None is the attack's own default."""

    name: str
    share: float
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.name not in ATTACKS:
            raise ConfigError(f"unknown attack {self.name!r}; known: {', '.join(ATTACKS)}")
        if not 0 <= self.share <= 1:
            raise ConfigError(f"share (of clients that attack) must be from 0 to 1, got {self.share!r}")

    def send(self, known: Known) -> "Tensor":
        """What the attackers send, [attacker, entry]."""
        row = ATTACKS[self.name]
        return row.send(known, row.scale if self.scale is None else self.scale)


def malicious(seed: int, clients: int, share: float) -> np.ndarray:
    """Which clients attack, bool [client]: drawn from the run's seed, and part of those of any larger share.

    >>> int(malicious(0, 5, 0.4).sum()), bool((malicious(0, 5, 0.4) <= malicious(0, 5, 0.6)).all())
    (2, True)
    """
    chosen = np.zeros(clients, bool)
    chosen[generator(seed, "malicious").permutation(clients)[: round(share * clients)]] = True
    return chosen


def _mean(known: Known) -> "Tensor":
    return known.honest.double().mean(0)


def _rms(updates: "Tensor") -> "Tensor":
    """The root mean square of each row, [row, 1] in float64."""
    return updates.double().square().mean(1, keepdim=True).sqrt()
