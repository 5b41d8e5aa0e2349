"""Local training: models, the reference loop, lanes, and what is fast."""
