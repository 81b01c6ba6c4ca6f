"""How the command's own process treats memory that it frees."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's numbers for these options
MMAP_THRESHOLD_BYTES = 32 * 2**20  # larger pieces still go back to the system at once
TRIM_THRESHOLD_BYTES = 128 * 2**20


def keep_freed_memory() -> None:
    """Keep what a round frees for the next round, from now on and in all of this process.

    By default, glibc gives every piece of some size back to the system at once, and each round then begins with the
    system clearing pages: a sixth of the time of a network with 80,000 parameters and 20 clients. Only a program that
    owns its process may decide this, so the library does not.
    """
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
