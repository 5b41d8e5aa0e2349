"""Local training: models, the reference loop, lanes, and fast versions of both."""
