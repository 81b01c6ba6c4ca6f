"""What is known of the processor."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar

_one: ContextVar[bool] = ContextVar("one", default=False)


def cores() -> int:
    """Return how many cores this process may use."""
    if _one.get():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Use one core inside: work that would be shared out is done here, one part after another."""
    token = _one.set(True)
    try:
        yield
    finally:
        _one.reset(token)
