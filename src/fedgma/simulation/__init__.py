"""Federated runs, many at once: what a run is, what it draws, how a round is played."""
