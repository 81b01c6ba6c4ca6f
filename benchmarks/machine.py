"""The machine that benchmarks run on: what it is, what it can do, and how busy others keep it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from coterie.compute.cpu import cores

SUBREAPER = 36  # of prctl(2)
TICKS = os.sysconf("SC_CLK_TCK")  # of /proc/stat, a second


class Busy:
    """How busy other processes keep the machine from here on."""

    def __init__(self) -> None:
        _adopt()
        self.before = self._seconds()

    def others(self) -> float:
        """Their share of all cores; 0 where it cannot be known."""
        busy, everything, own = (now - then for now, then in zip(self._seconds(), self.before, strict=True))
        return min(max((busy - own) / everything, 0.0), 1.0) if everything else 0.0

    @staticmethod
    def _seconds() -> tuple[float, float, float]:
        """(busy, all, this process and its children), summed over the cores."""
        own = sum(os.times()[:4]) + sum(map(_spent, _descendants(os.getpid())))
        try:
            ticks = [int(text) for text in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        except OSError:
            return own, 0.0, own
        idle = ticks[3] + ticks[4]
        return (sum(ticks) - idle) / TICKS, sum(ticks) / TICKS, own


def _adopt() -> None:
    """Descendants whose parents have ended become children of this process (on Linux): so they are not others."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def _descendants(process: int) -> list[int]:
    """The living ones, and those that nobody has waited for: what others took is in `os.times` already."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
    found = [process]
    for each in found:  # which grows
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


def _spent(process: int) -> float:
    """Seconds of a process and of its dead children."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:  # it has ended meanwhile
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def matmul_rate() -> float:
    """Floating-point operations a second, of 1024 x 1024 float32 products on all cores."""
    a = torch.randn(1024, 1024)
    return 2 * 1024**3 / statistics.median(seconds(lambda: a @ a) for _ in range(5))


def about() -> dict[str, Any]:
    """What a figure must be read with: the machine and the versions."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": cores(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,  # GB
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "commit": _commit(),
    }


def _field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")


def _commit() -> str:
    """Of this checkout; what was changed since is said."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", "../src")
        return git("rev-parse", "--short=10", "HEAD") + (", changed" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
