"""Options that an app may still have from another strategy of Flower: each is refused with what takes its place."""

import inspect
from collections.abc import Iterable

from fedgma.aggregation.own import AnyRule, as_rule
from fedgma.aggregation.rule import Rule
from fedgma.aggregation.rules import masked_mean
from fedgma.errors import ConfigError, did_you_mean, nearest

TAU = 0.4  # the paper's
ADAPTIVE = ("eta", "eta_l", "beta_1", "beta_2")  # of FedAdam, FedYogi and FedAdagrad
KRUM = "belongs to a rule; give it there, such as aggregator=fedgma.multi_krum(share=0.2)"
ELSEWHERE = {  # options of other strategies, with what takes their place
    **dict.fromkeys(ADAPTIVE, "belongs to the server optimiser; give it there, such as optimizer=fedgma.yogi(0.01)"),
    **dict.fromkeys(
        ("server_learning_rate", "server_momentum"),
        "belongs to the server optimiser; give it there, such as optimizer=fedgma.momentum(1.0, beta=0.9)",
    ),
    "proximal_mu": "is for the clients, which read it from their config; send it by {config}",
    "beta": "belongs to a rule; give it there, such as aggregator=fedgma.trimmed_mean(share=0.2)",
    **dict.fromkeys(("num_malicious_nodes", "num_malicious_clients", "num_nodes_to_select"), KRUM),
}
CONFIGS = {  # how each interface sends settings to clients
    "Masked": 'start(..., train_config=ConfigRecord({"proximal-mu": 0.1}))',
    "MaskedFit": 'on_fit_config_fn=lambda round: {"proximal_mu": 0.1}',
}
RENAMED = {  # between Flower's two interfaces
    "fraction_fit": "fraction_train",
    "min_fit_clients": "min_train_nodes",
    "min_evaluate_clients": "min_evaluate_nodes",
    "min_available_clients": "min_available_nodes",
}


def rule_of(tau: float | None, aggregator: AnyRule | None) -> Rule:
    """The rule of a strategy: `aggregator`, or gradient masked averaging at `tau`; both would contradict each other.

    >>> rule_of(None, None).settings
    {'tau': 0.4}
    """
    if aggregator is None:
        return masked_mean(TAU if tau is None else tau)
    if tau is not None:
        raise ConfigError("tau has no effect beside an aggregator; give it there, such as fedgma.masked_mean(tau=0.4)")
    return as_rule(aggregator)


def check_options(given: Iterable[str], strategy: type) -> None:
    """Raise `ConfigError` for an option that a strategy and its base do not have."""
    known = {name for kind in strategy.__mro__[:2] for name in inspect.signature(kind.__init__).parameters}  # type: ignore[misc]
    both = {**RENAMED, **{new: old for old, new in RENAMED.items()}}
    for name in given:
        if name in known:
            continue
        if name in ELSEWHERE:
            raise ConfigError(f"{name} {ELSEWHERE[name].format(config=CONFIGS.get(strategy.__name__, 'the config'))}")
        hint = did_you_mean([both[name]] if both.get(name) in known else nearest(name, known))
        raise ConfigError(f"unknown option {name!r} of {strategy.__name__}{hint}")
