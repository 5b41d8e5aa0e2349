"""Flower: a strategy for its message API, one for apps that use `aggregate_fit`, and a supervisor."""

from fedgma.flower.legacy import MaskedFit
from fedgma.flower.messages import identify
from fedgma.flower.strategy import Masked

__all__ = ["Masked", "MaskedFit", "identify"]
