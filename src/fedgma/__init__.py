"""Gradient masked averaging for federated learning: exact, streaming, and a drop-in for any server."""

__version__ = "0.1.0"
