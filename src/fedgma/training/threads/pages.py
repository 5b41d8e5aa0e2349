"""Memory pages of this process: kept instead of returned and mapped again, and huge where many are needed at once.

Outside Linux and glibc both functions do nothing.
"""

import ctypes
import functools
import os
import sys

# numbers of glibc and Linux
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, HUGE_PAGES = -1, -2, -3, 14
LARGEST_KEPT = 32 * 2**20  # bytes of an allocation: glibc takes larger ones from the system each time


@functools.cache
def keep_pages() -> bool:
    """Keep freed memory in this process; returns whether that was possible (glibc).

    By default glibc returns large pieces to the system at once, and in threads whole heaps of 64 MiB. Every page is
    zeroed and mapped again when it comes back: up to a tenth of the time of training in threads. With the padding of
    the top no heap is small enough to be returned.
    """
    change = getattr(_libc(), "mallopt", None)
    settings = ((MMAP_THRESHOLD, LARGEST_KEPT), (TRIM_THRESHOLD, 2**31 - 1), (TOP_PAD, 2 * LARGEST_KEPT))
    return change is not None and all(change(*setting) == 1 for setting in settings)


def use_huge_pages(address: int, size: int) -> bool:
    """Ask for huge pages in fresh memory, which are mapped many at a time; returns whether the system knows them."""
    advise = getattr(_libc(), "madvise", None)
    page = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
    first, last = -(-address // page) * page, (address + size) // page * page
    if advise is None or last <= first:
        return False
    return bool(advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), HUGE_PAGES) == 0)


@functools.cache
def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
