"""Shared settings of the tests: hypothesis without deadlines (machines are noisy), and where the full data are."""

from hypothesis import settings

settings.register_profile("steady", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("steady")
