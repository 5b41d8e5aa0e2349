"""A browser for the tests of pages."""

import tempfile

import pytest

from browser import Browser


@pytest.fixture(scope="session")
def browser():
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        opened = Browser(folder)
        yield opened
        opened.close()
