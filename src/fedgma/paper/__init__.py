"""Reproduction of the paper: its experiments, its printed numbers, and the comparison with our runs."""
