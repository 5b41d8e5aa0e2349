"""Pages: advice to the system, which changes no number."""

import sys

import pytest
import torch

from fedgma.training.threads import pages


def test_the_system_takes_the_advice_or_is_left_alone():
    assert pages.keep_pages() in (True, False)
    values = torch.arange(2**21, dtype=torch.float32)
    assert pages.use_huge_pages(values.data_ptr(), values.nbytes) in (True, False)
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
