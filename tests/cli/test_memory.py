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

if sys.argv[1] == "keep":
    keep_freed_memory()
before = resident()
pieces = [torch.ones(5 * 2**20) for _ in range(3)]  # 21 MB each
assert resident() - before > 60
del pieces
print(resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
@pytest.mark.parametrize("mode", ["keep", "give back"])
def test_freed_memory_is_kept_where_it_is_asked_for(mode):
    done = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True)
    assert (float(done.stdout) > 40) == (mode == "keep")


def test_the_command_keeps_freed_memory(monkeypatch):
    called = []
    monkeypatch.setattr(coterie.cli, "keep_freed_memory", lambda: called.append("memory"))
    monkeypatch.setattr(coterie.cli, "app", lambda **_: called.append("command"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    coterie.cli.main()
    assert called == ["memory", "command"]
