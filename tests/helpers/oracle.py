"""The slow, literal reference: the paper's formulas per coordinate, in exact arithmetic, with plain loops."""

from fractions import Fraction


def sign(value):
    return (value > 0) - (value < 0)


def agreement(values):
    return Fraction(abs(sum(sign(value) for value in values)), len(values))


def soft_mask(values, tau):
    score = agreement(values)
    return Fraction(1) if score >= tau else score


def hard_mask(values, tau):
    return Fraction(int(agreement(values) >= tau))


def weighted_mean(values, weights):
    total = sum(Fraction(weight) for weight in weights)
    return sum(Fraction(weight) * Fraction(float(value)) for value, weight in zip(values, weights, strict=True)) / total


def masked_mean(columns, weights, tau):
    """Mean and mask per coordinate; `columns` is [client][coordinate]."""
    width = len(columns[0])
    per_entry = [[client[j] for client in columns] for j in range(width)]
    return [weighted_mean(values, weights) for values in per_entry], [soft_mask(values, tau) for values in per_entry]
