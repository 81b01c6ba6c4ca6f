"""The process of the command line."""

from __future__ import annotations

import subprocess
import sys

TELL = """
import gc, atexit, sys, coterie.cli
coterie.cli.main = lambda: print(gc.isenabled(), gc.get_freeze_count() > 100_000) or exit(3)
sys.argv = ["coterie"]
atexit.register(lambda: print(len(gc.get_objects()) < 1000))
from coterie.__main__ import main
main()
"""


def test_what_is_imported_is_not_looked_at_again() -> None:
    done = subprocess.run([sys.executable, "-c", TELL], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3, done.stderr
    assert done.stdout.split() == ["True", "True", "True"]  # collected as usual meanwhile, and nothing left at the end
