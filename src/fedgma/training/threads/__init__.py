"""Whole clients in threads on a CPU (`trainer`): which models allow it (`safety`), and what makes their steps cheap."""
