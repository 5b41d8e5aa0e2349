"""Pages: advice to the system, which changes no number."""

import sys

import pytest
import torch

from fedgma.training.threads import pages


def test_pages_are_kept_where_the_system_has_glibc():
    assert pages.keep_pages() == (sys.platform == "linux" and hasattr(pages._libc(), "mallopt"))


def test_huge_pages_hold_the_same_values():
    values = torch.arange(2**21, dtype=torch.float32)
    pages.use_huge_pages(values.data_ptr(), values.nbytes)  # a system without them refuses
    assert torch.equal(values, torch.arange(2**21, dtype=torch.float32))


def test_less_than_a_page_is_left_alone():
    assert not pages.use_huge_pages(4096 + 1, 100)


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_other_systems_are_left_alone(platform, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    for function in (pages._libc, pages.keep_pages):
        function.cache_clear()
    try:
        assert not pages.keep_pages()
        assert not pages.use_huge_pages(0, 2**21)
    finally:
        for function in (pages._libc, pages.keep_pages):
            function.cache_clear()
