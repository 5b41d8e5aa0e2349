"""Figures of the paper's experiments, with the printed numbers."""
