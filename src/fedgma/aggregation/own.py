"""A user's own rule: a function of sums, a class with one, or a `Rule`; all become a `Rule` (docs/rules.md)."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fedgma.aggregation.gate import Gate, find_refusal
from fedgma.aggregation.rule import Rule
from fedgma.aggregation.view import READABLE, is_bound
from fedgma.arrays import Params
from fedgma.errors import ConfigError

AnyRule = Rule | Callable[..., Any]
PLAIN = (bool, int, float, str, type(None))


def as_rule(given: Any, name: str | None = None) -> Rule:
    """The rule that a user's function, class or object stands for; a `Rule` stays what it is.

    A function asks for sums by the names of its arguments and returns the step, (mean, mask) or (mean, mask, state).
    Arguments with a default that are no sums are settings. A class is made without arguments; its objects are called
    as such a function, and may have `state` (name -> first value), `measure` (another function of sums) and `prepare`
    (changes one client's update).

    >>> def magnitude(mean, total, positive, negative):
    ...     return mean, abs(total) / (positive + negative + 1e-30)
    >>> as_rule(magnitude).further
    ('parts',)
    """
    if isinstance(given, Rule):
        return given
    if inspect.isclass(given):
        return as_rule(_instance(given), name or given.__name__)
    if isinstance(given, list | tuple):
        raise ConfigError(
            f"aggregator: expected a rule or a function of sums, got {given!r:.60}; give one rule, or name several in "
            "the settings of runs, such as {'aggregator': ['mean', 'ties']}"
        )
    if not callable(given):
        raise ConfigError(
            f"aggregator: expected a rule or a function of sums, got {given!r:.60}; "
            "a rule of the library is made by a call, such as fedgma.masked_mean(tau=0.4)"
        )
    if inspect.isroutine(given) and inspect.signature(given).return_annotation is Rule:
        raise ConfigError(f"aggregator: {given.__name__} makes a rule; call it, such as {given.__name__}()")
    title = name or getattr(given, "__name__", None) or type(given).__name__
    prepare, state = getattr(given, "prepare", None), getattr(given, "state", {})
    if not isinstance(state, Mapping) or not all(isinstance(value, int | float) for value in state.values()):
        raise ConfigError(f"rule {title!r}: state must name arrays with their first value, such as {{'before': 0.0}}")
    if clash := sorted(set(state) & set(READABLE)):
        raise ConfigError(f"rule {title!r}: {clash[0]!r} is the name of a sum; choose another name for the state")
    return Rule(
        title,
        compute=given,
        prepare=None if prepare is None else OwnPrepare(prepare, title),
        settings=_settings(given),
        measure=getattr(given, "measure", None),
        state=dict(state),
    )


@dataclass(frozen=True)
class OwnPrepare:
    """A user's `prepare(update)`; an update that the gate refuses is passed on as it is."""

    function: Callable[[Params], Params]
    rule: str = "own"

    def __call__(self, update: Params, buffers: Collection[str] | None) -> Params:
        """The changed update."""
        if not isinstance(update, Mapping) or find_refusal(update, Gate()) is not None:
            return update
        try:
            changed = self.function(update)
        except Exception as error:  # a user's function may raise anything
            raise ConfigError(f"rule {self.rule!r}: prepare failed ({type(error).__name__}: {error})") from error
        if not isinstance(changed, Mapping) or set(changed) != set(update):
            got = sorted(map(str, changed))[:5] if isinstance(changed, Mapping) else type(changed).__name__
            raise ConfigError(f"rule {self.rule!r}: prepare must return an update with the same names, got {got}")
        return changed


def _instance(kind: type) -> Any:
    try:
        return kind()
    except TypeError as error:
        raise ConfigError(f"rule {kind.__name__!r}: the class must be made without arguments ({error})") from None


def _settings(given: Any) -> dict[str, Any]:
    """Plain values that distinguish two rules of one name: an object's attributes, a function's defaults."""
    held = dict(getattr(given, "__dict__", {})) if not inspect.isroutine(given) else {}
    for name, parameter in inspect.signature(given).parameters.items():
        if name not in READABLE and (parameter.default is not parameter.empty or is_bound(given, name)):
            held.setdefault(name, parameter.default)
    return {name: value for name, value in held.items() if isinstance(value, PLAIN)}
