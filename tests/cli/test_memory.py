"""The command keeps freed memory in its own process; nothing else does."""

import subprocess
import sys

import pytest

import coterie.cli

SCRIPT = """
import os, sys
from pathlib import Path
import torch
from coterie.cli.memory import keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

def left():
    before = resident()
    pieces = [torch.ones(5 * 2**20) for _ in range(3)]  # 21 MB each
    assert resident() - before > 60
    del pieces
    return resident() - before

print(left())
keep_freed_memory()
print(left())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
def test_freed_memory_is_kept_where_it_is_asked_for():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    given_back, kept = map(float, done.stdout.split())
    assert given_back < 40 < kept


def test_the_command_keeps_freed_memory(monkeypatch):
    called = []
    monkeypatch.setattr(coterie.cli, "keep_freed_memory", lambda: called.append("memory"))
    monkeypatch.setattr(coterie.cli, "app", lambda **_: called.append("command"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    coterie.cli.main()
    assert called == ["memory", "command"]
