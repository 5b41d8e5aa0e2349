"""No test reads or writes the user's cache or data folders."""

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDGMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDGMA_DATA", raising=False)
