"""What is known of the processor. What changes the last bit goes by its maker, not by a measurement, so that a resumed
run has the same bits."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path


@functools.cache
def intel() -> bool:
    """Whether Intel made it: for these, MKL has other code than for all others."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return "Intel" in platform.processor()


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
