"""One table of aggregators and one of server optimisers; every law runs over every row, so a new one inherits them."""

import fedgma

AGGREGATORS = {
    "gma": fedgma.masked_mean(0.4),
    "gma soft": fedgma.masked_mean(1.0),
    "gma off": fedgma.masked_mean(0.0),
    "mean": fedgma.mean(),
    "and_mask": fedgma.and_mask(0.4),
    "and_mask rescaled": fedgma.and_mask(0.4, inverse_sparsity_scale=True),
    "sign_test": fedgma.sign_test(0.6),
    "rlr": fedgma.rlr(2),
    "median": fedgma.median(),
    "trimmed_mean": fedgma.trimmed_mean(0.2),
    "multi_krum": fedgma.multi_krum(0.2),
    "damped_mean": fedgma.damped_mean(0.4),
    "shuffled_mask": fedgma.shuffled_mask(0.4, seed=3),
    "norm_kept": fedgma.norm_kept(0.4),
    "masked_extra": fedgma.masked_extra(0.4),
    "stale_mask": fedgma.stale_mask(0.4),
    "cross_fitted": fedgma.cross_fitted(0.4, seed=3),
    "ties": fedgma.ties(0.5),
    "majority_sign": fedgma.majority_sign(),
    "magnitude_agreement": fedgma.magnitude_agreement(0.6),
    "voters_only": fedgma.voters_only(0.8),
    "wiener": fedgma.wiener(0.5, population=9),
    "james_stein": fedgma.james_stein(population=9),
    "fedexp": fedgma.fedexp(),
    "by_array": fedgma.by_array(fedgma.masked_mean(0.7), {"*bias": fedgma.majority_sign(), "*conv*": fedgma.rlr(2)}),
    "smoothed": fedgma.smoothed(fedgma.keep_norm(fedgma.unmasked(fedgma.magnitude_agreement(0.9), "*bias")), 0.75),
    "clipped gma": fedgma.clipped(fedgma.masked_mean(0.4), norm=2.0),
    "clipped median": fedgma.clipped(fedgma.median(), norm=2.0),
}
STREAMING = {name: aggregator for name, aggregator in AGGREGATORS.items() if aggregator.streams}

OPTIMIZERS = {
    "sgd": fedgma.sgd(0.5),
    "momentum": fedgma.momentum(0.5, beta=0.9),
    "adagrad": fedgma.adagrad(0.1),
    "adam": fedgma.adam(0.1),
    "yogi": fedgma.yogi(0.1),
    "adam before": fedgma.adam(0.1, mask_position="before"),
    "averaged": fedgma.averaged(fedgma.momentum(0.5), 0.75),
    "yogi before": fedgma.yogi(0.1, mask_position="before"),
}
