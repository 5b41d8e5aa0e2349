"""Figures of federated data, accuracy by round, client agreement and grids of settings. Needs no torch."""

from fedgma.reports.plots.advice import draw_gains, draw_search
from fedgma.reports.plots.curves import draw_accuracy
from fedgma.reports.plots.federations import draw_classes, draw_images, draw_sizes, examples
from fedgma.reports.plots.grids import draw_fairness, draw_rates
from fedgma.reports.plots.masks import draw_agreement, draw_layers, draw_stability, draw_taus
from fedgma.reports.plots.specifications import draw_specifications
from fedgma.reports.plots.style import save, svg

__all__ = [
    "draw_accuracy",
    "draw_agreement",
    "draw_classes",
    "draw_fairness",
    "draw_gains",
    "draw_images",
    "draw_layers",
    "draw_rates",
    "draw_search",
    "draw_sizes",
    "draw_specifications",
    "draw_stability",
    "draw_taus",
    "examples",
    "save",
    "svg",
]
