"""Experiments: settings become runs, runs become folders that can be resumed; `play` trains them."""
