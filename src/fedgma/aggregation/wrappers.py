"""Rules made of rules; each takes a rule and gives a rule, so they can be nested.

clipped(rule, norm)             over updates of bounded norm (in `rules`)
by_array(rule, {pattern: rule}) another rule for arrays whose names match a pattern: thresholds of their own
unmasked(rule, pattern, ...)    arrays whose names match are averaged without a mask
keep_norm(rule)                 the masked mean, scaled per array to the norm of the mean
smoothed(rule, beta)            the mask averaged over rounds
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from fedgma.aggregation.aggregate import or_one, row_norms
from fedgma.aggregation.own import AnyRule, as_rule
from fedgma.aggregation.rule import Rule
from fedgma.aggregation.view import Step, View
from fedgma.arrays import Array, cast, spec
from fedgma.errors import ConfigError

SHOWN = 8  # names of arrays in a message


def by_array(rule: AnyRule, others: Mapping[str, AnyRule]) -> Rule:
    """The same rule, but another one for arrays whose name matches a pattern such as "conv*"; the first match counts.

    So layers can have thresholds of their own, or no mask:

    >>> import numpy as np
    >>> from fedgma.aggregation.rules import masked_mean, mean
    >>> rule = by_array(masked_mean(0.4), {"conv*": masked_mean(1.0), "head.*": mean()})
    >>> updates = np.array([[3.0], [3.0], [-3.0]])
    >>> rule({"conv1": updates, "fc": updates, "head.bias": updates}).mask["conv1"].round(3).tolist()
    [0.333]
    """
    rule, rules = as_rule(rule), {pattern: as_rule(other) for pattern, other in others.items()}
    for pattern, other in rules.items():
        parts = {"prepare": other.prepare, "combine": other.combine, "measure": other.measure}
        for part in [part for part, function in parts.items() if function is not None and function != rule.prepare]:
            raise ConfigError(f"by_array: {other.name!r} for {pattern!r} has `{part}`, which is for a whole model")
        if other.keep_length:
            raise ConfigError(f"by_array: {other.name!r} for {pattern!r} keeps lengths, which is for a whole model")
    if rule.combine is not None or rule.keep_length:
        raise ConfigError(f"by_array: {rule.name!r} is a rule for a whole model and cannot be divided by arrays")
    state = {name: first for member in (rule, *rules.values()) for name, first in member.state.items()}
    settings = {**rule.settings, "arrays": {name: [other.name, dict(other.settings)] for name, other in rules.items()}}
    compute = ByArray(rule, tuple(rules.items()))
    return replace(rule, name=f"by_array_{rule.name}", compute=compute, state=state, settings=settings)


def unmasked(rule: AnyRule, *patterns: str) -> Rule:
    """The same rule, but arrays whose names match one of the patterns are averaged without a mask.

    >>> import numpy as np
    >>> from fedgma.aggregation.rules import and_mask
    >>> updates = {"w": np.array([[1.0], [-3.0]]), "head.bias": np.array([[1.0], [-3.0]])}
    >>> unmasked(and_mask(1.0), "head.*")(updates).update
    {'w': array([-0.]), 'head.bias': array([-1.])}
    """
    rule = as_rule(rule)
    return replace(by_array(rule, dict.fromkeys(patterns, Rule("mean"))), name=f"unmasked_{rule.name}")


def patterns_of(rule: Rule) -> tuple[str, ...]:
    """The patterns of names by which a rule, or one inside it, chooses arrays."""
    own = tuple(pattern for pattern, _ in rule.compute.others) if isinstance(rule.compute, ByArray) else ()
    inside = rule.compute.inner if isinstance(rule.compute, ByArray | KeepNorm | Smooth) else None
    return own if inside is None else (*own, *patterns_of(inside))


def check_patterns(rule: Rule, names: Collection[str]) -> None:
    """Raise `ConfigError` if no pattern of `by_array` and `unmasked` fits an array: they would have no effect.

    >>> check_patterns(unmasked(Rule("mean"), "haed.*"), ["conv.weight", "head.weight"])
    Traceback (most recent call last):
    ...
    fedgma.errors.ConfigError: rule 'unmasked_mean': the model has no array 'haed.*'; it has conv.weight, head.weight
    """
    patterns = patterns_of(rule)
    if patterns and not any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
        wanted = " or ".join(map(repr, patterns))
        listed = ", ".join(list(names)[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        raise ConfigError(f"rule {rule.name!r}: the model has no array {wanted}; it has {listed}")


def keep_norm(rule: AnyRule) -> Rule:
    """The same rule, its masked mean scaled per array to the norm of its mean; a mask that leaves nothing stays."""
    rule = as_rule(rule)
    return replace(rule, name=f"norm_kept_{rule.name}", compute=KeepNorm(rule))


def smoothed(rule: AnyRule, beta: float = 0.9) -> Rule:
    """The same rule with its mask averaged over rounds: beta times the one before, 1 - beta times that of this round.

    It starts from a mask of ones.

    >>> import numpy as np
    >>> from fedgma.aggregation.rules import and_mask
    >>> smoothed(and_mask(1.0), beta=0.75)({"w": np.array([[1.0], [-3.0]])}).mask["w"].tolist()
    [0.75]
    """
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta < 1:
        raise ConfigError(f"beta (the weight of the mask before) must be at least 0 and below 1, got {beta!r}")
    rule = as_rule(rule)
    if "smoothed" in rule.state:
        raise ConfigError(f"{rule.name!r} is smoothed already")
    return replace(
        rule,
        name=f"smoothed_{rule.name}",
        compute=Smooth(rule, float(beta)),
        settings={**rule.settings, "beta": beta},
        state={**rule.state, "smoothed": 1.0},
    )


@dataclass(frozen=True)
class KeepNorm:
    """The step of a rule, with a mask that keeps the norm of its mean."""

    inner: Rule

    @property
    def reads(self) -> tuple[str, ...]:
        """What the inner rule asks for."""
        return self.inner.asks

    def __call__(self, view: View) -> Step:
        """The step of one array."""
        step = self.inner.step(view)
        return step if step.mask is None else step._replace(mask=to_norm(step.mean, step.mask))


def to_norm(mean: Array, mask: Array) -> Array:
    """The mask over the ratio by which it shortens the mean; a mask that leaves nothing stays."""
    ratio = row_norms(cast(mean, "float64") * mask) / or_one(row_norms(mean))
    return mask / cast(or_one(ratio), spec(mask).dtype)[..., None]


@dataclass(frozen=True)
class Smooth:
    """The step of a rule, with a mask that is averaged over rounds."""

    inner: Rule
    beta: float

    @property
    def reads(self) -> tuple[str, ...]:
        """What the inner rule asks for."""
        return self.inner.asks

    def __call__(self, view: View) -> Step:
        """The step of one array."""
        step = self.inner.step(view)
        now = view.mean * 0 + 1 if step.mask is None else step.mask
        mask = self.beta * view.state["smoothed"] + (1 - self.beta) * now
        return Step(step.mean, mask, {**step.state, "smoothed": mask})


@dataclass(frozen=True)
class ByArray:
    """The step of the rule that an array's name chooses."""

    inner: Rule  # for names that fit no pattern
    others: tuple[tuple[str, Rule], ...]

    @property
    def reads(self) -> tuple[str, ...]:
        """What any of the rules asks for."""
        return (*self.inner.asks, *(name for _, rule in self.others for name in rule.asks))

    def __call__(self, view: View) -> Step:
        """The step of one array."""
        chosen = next((rule for pattern, rule in self.others if fnmatchcase(view.name, pattern)), None)
        if chosen is None:
            return self.inner.step(view)
        return chosen.step(replace(view, mask=None if chosen.mask is None else view.vote_mask(chosen.mask)))
