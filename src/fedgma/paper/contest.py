"""Which rule earns its place: arms of several rules and servers, each at its own rates, against the plain mean.

An arm is an algorithm and a rule. A rule is compared with the mean of the same server, and the mean of another server,
or an average of models, with the mean of FedAvg. Runs are paired by seed. Seeds in which one of the two diverged are
counted and left out of the difference, unless all are asked for: with them an interval says little, and without them an
arm is not charged for the runs that it loses.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from fedgma.aggregation.rules import BASELINE
from fedgma.paper.entries import Entry
from fedgma.paper.rates import rule_of, setting_of
from fedgma.statistics.comparisons import over_seeds
from fedgma.statistics.convergence import converge
from fedgma.statistics.labels import NAMES
from fedgma.statistics.power import LEAST_SEEDS, LEVEL
from fedgma.statistics.verdicts import Verdict, correct, paired

PLAIN = ("fedavg", BASELINE)
CONTROLS = ("stale_mask", "cross_fitted", "damped_mean", "shuffled_mask")  # they explain; nobody would use them
OTHERS = ("fedexp",)  # longer steps that a mask has to beat
BELOW, ABOVE, SETS = 0.3, 0.5, 2  # points that a rule may lose nowhere, has to gain, and on how many data sets
COMMON = ("100", "20 steps", "1 epochs", "half_crop_flip")  # what the settings of a contest have in common
SERVERS = {"fedavg": "", "fedavgm": "FedAvgM", "fedadam": "FedAdam"}

Arm = tuple[str, str]  # algorithm, rule with its unusual settings
Scores = Mapping[str, Mapping[Arm, Mapping[int, float]]]  # setting -> arm -> seed -> percent


class Gain(NamedTuple):
    """What an arm gains over its baseline in one setting."""

    setting: str
    arm: Arm
    level: float  # mean over seeds, in percent
    verdict: Verdict
    lost: tuple[int, int] = (0, 0)  # runs of the arm and of its baseline that diverged

    @property
    def interval(self) -> tuple[float, float]:
        """The interval that covers the truth in all tests of its table at once, with 95 % (Bonferroni).

        Fewer pairs than a verdict needs are no test of the table, so they bound nothing.
        """
        from scipy.special import stdtrit

        verdict = self.verdict
        if verdict.of < LEAST_SEEDS:
            return -math.inf, math.inf
        half = float(stdtrit(verdict.of - 1, 1 - LEVEL / 2 / verdict.tests)) * verdict.deviation / math.sqrt(verdict.of)
        return verdict.mean - half, verdict.mean + half


def scores_of(entries: Iterable[Entry], split: str = "test") -> Scores:
    """The mean of the last ten rounds of every run, by setting, arm and seed."""
    scores: dict[str, dict[Arm, dict[int, float]]] = {}
    for entry in entries:
        if split in entry.scores:
            arm = str(entry.settings["algorithm"]), rule_of(entry.settings)
            by_seed = scores.setdefault(setting_of(entry.settings), {}).setdefault(arm, {})
            by_seed[entry.seed] = float(entry.scores[split].last10)
    return scores


def baseline_of(arm: Arm) -> Arm:
    """The arm that an arm has to beat: the mean of its server, or the mean of FedAvg.

    >>> baseline_of(("fedadam", "wiener")), baseline_of(("fedadam", "mean")), baseline_of(("fedavg", "fedexp"))
    (('fedadam', 'mean'), ('fedavg', 'mean'), ('fedavg', 'mean'))
    """
    return PLAIN if arm[1].startswith(BASELINE) else (arm[0], BASELINE)


def gains_of(scores: Scores, *, diverged: bool = False) -> list[Gain]:
    """What every arm gains in every setting, with or without diverged seeds; tests are corrected together."""
    gains = []
    for setting, arms in scores.items():
        half = _half(arms)
        least = -math.inf if diverged else half
        for arm, by_seed in arms.items():
            plain = arms.get(baseline_of(arm), {})
            apart = [by_seed[s] - plain[s] for s in sorted({*by_seed} & {*plain}) if min(by_seed[s], plain[s]) >= least]
            if arm != baseline_of(arm) and apart:
                verdict = paired(apart, (label(arm), "the mean"))
                lost = (_below(by_seed, half), _below(plain, half))
                gains.append(Gain(setting, arm, sum(by_seed.values()) / len(by_seed), verdict, lost))
    corrected = correct([gain.verdict for gain in gains])
    return [gain._replace(verdict=verdict) for gain, verdict in zip(gains, corrected, strict=True)]


class Pooled(NamedTuple):
    """How far apart two arms are over several settings."""

    verdict: Verdict  # over seeds; the difference of a seed is its mean over settings
    ahead: int  # settings in which the first arm is ahead
    of: int  # settings
    lost: int  # runs of the two arms that diverged


def pooled(scores: Scores, first: Arm, second: Arm, *, diverged: bool = False) -> Pooled | None:
    """One arm minus another over all settings, with or without diverged seeds; None if no seed is left.

    >>> scores = {"mnist": {("fedavg", "gma"): {0: 91.0, 1: 92.0}, ("fedavg", "mean"): {0: 90.0, 1: 90.0}}}
    >>> found = pooled(scores, ("fedavg", "gma"), PLAIN)
    >>> found.verdict.mean, found.ahead, found.of, found.lost
    (1.5, 1, 1, 0)
    """
    rows, lost = [], 0
    for arms in scores.values():
        half, (mine, theirs) = _half(arms), (arms.get(first, {}), arms.get(second, {}))
        least = -math.inf if diverged else half
        rows.append({s: mine[s] - theirs[s] for s in {*mine} & {*theirs} if min(mine[s], theirs[s]) >= least})
        lost += _below(mine, half) + _below(theirs, half)
    values = over_seeds(rows)
    if not values:
        return None
    ahead = sum(sum(row.values()) > 0 for row in rows)
    return Pooled(paired(values, (label(first), label(second))), ahead, len(rows), lost)


def _half(arms: Mapping[Arm, Mapping[int, float]]) -> float:
    """Half of the median score of a setting; a run below it diverged."""
    return median(value for by_seed in arms.values() for value in by_seed.values()) / 2


def _below(by_seed: Mapping[int, float], half: float) -> int:
    return sum(value < half for value in by_seed.values())


def is_candidate(arm: Arm) -> bool:
    """Whether an arm can be a finalist: a rule that is neither the mean, nor FedAvg's GMA, nor there to explain.

    >>> [is_candidate(arm) for arm in (("fedavg", "ties"), ("fedavg", "gma"), ("fedadam", "gma"), ("fedavg", "fedexp"))]
    [True, False, True, False]
    """
    return arm != ("fedavg", "gma") and not arm[1].startswith((BASELINE, *CONTROLS, *OTHERS))


def ranked(gains: Sequence[Gain]) -> list[tuple[Arm, float]]:
    """Candidates that were run in every setting, with their mean gain over the settings; the best first."""
    settings = dict.fromkeys(gain.setting for gain in gains)
    by_arm: dict[Arm, dict[str, float]] = {}
    for gain in gains:
        by_arm.setdefault(gain.arm, {})[gain.setting] = gain.verdict.mean
    complete = {
        arm: gains_of_arm
        for arm, gains_of_arm in by_arm.items()
        if is_candidate(arm) and len(gains_of_arm) == len(settings)
    }
    means = {arm: sum(gains_of_arm.values()) / len(gains_of_arm) for arm, gains_of_arm in complete.items()}
    return sorted(means.items(), key=lambda item: (-item[1], item[0]))


def earns(gains: Sequence[Gain], arm: Arm) -> bool:
    """Whether a rule is nowhere below its baseline by more than 0.3 points, and above it by 0.5 on two data sets.

    Both are read from intervals that hold for all tests of the table at once.
    """
    gains_of_arm = [gain for gain in gains if gain.arm == arm]
    above = {gain.setting.partition(",")[0] for gain in gains_of_arm if gain.interval[0] >= ABOVE}
    return bool(gains_of_arm) and all(gain.interval[0] >= -BELOW for gain in gains_of_arm) and len(above) >= SETS


def rising(entries: Iterable[Entry]) -> set[str]:
    """The settings in which an arm has not converged."""
    arms: dict[str, dict[Arm, list[Entry]]] = {}
    for entry in entries:
        arm = str(entry.settings["algorithm"]), rule_of(entry.settings)
        arms.setdefault(setting_of(entry.settings), {}).setdefault(arm, []).append(entry)
    return {setting for setting, runs_of_arm in arms.items() if not _converged([*runs_of_arm.values()])}


def _converged(arms: Sequence[Sequence[Entry]]) -> bool:
    courses = [[(entry.scores["test"], entry.curves.get("test")) for entry in runs] for runs in arms]
    return converge(courses, min(entry.played for runs in arms for entry in runs))[0].converged


def short(setting: str) -> str:
    """A setting in few words: data set and partition.

    >>> short("cifar10, client_dirichlet, 100, alpha 0.1, 1 epochs, half_crop_flip")
    'cifar10, client dirichlet, alpha 0.1'
    """
    kept = [word for word in setting.split(", ") if word not in COMMON]
    return ", ".join(kept).replace("_", " ")


def label(arm: Arm) -> str:
    """An arm in words.

    >>> label(("fedavg", "gma, unmasked fc3.*")), label(("fedadam", "wiener")), label(("fedavgm", "mean"))
    ('GMA, unmasked fc3.*', 'FedAdam, Wiener', 'FedAvgM, mean')
    """
    rule, comma, rest = arm[1].partition(",")
    server = SERVERS.get(arm[0], arm[0])
    return (f"{server}, " if server else "") + NAMES.get(rule, rule) + comma + rest
