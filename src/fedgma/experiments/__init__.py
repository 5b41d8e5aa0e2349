"""Experiments: settings to runs, runs to folders that can be resumed; `play` plays them."""
