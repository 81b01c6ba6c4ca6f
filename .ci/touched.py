"""Run the fast tests of the files that are named: a test file itself, and the tests that mirror a module."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_TESTS = 5  # pytest's exit code when all tests of the files are slow ones


def tests_of(path: str) -> Path | None:
    """Return where the tests of a file are, if it has any: src/coterie/core/rng.py has tests/core/test_rng.py."""
    file = Path(path)
    if file.parts[:1] == ("tests",):
        found = file if file.name.startswith("test_") else None
    elif file.parts[:2] == ("src", "coterie"):
        # A package's tests are named after it: core/__init__.py has core/test_core.py or test_core.py.
        module = file.parent if file.name == "__init__.py" else file.with_suffix("")
        inside = Path("tests", *module.parts[2:])
        found = inside.with_name(f"test_{module.name.strip('_')}.py")
    else:
        found = Path("tests", f"test_{file.stem}.py")
    return found if found is not None and (ROOT / found).is_file() else None


def main(paths: Iterable[str]) -> int:
    tests = sorted({str(found) for found in map(tests_of, paths) if found is not None})
    if not tests:
        return 0
    environment = {"OMP_NUM_THREADS": "1", "COTERIE_BACKEND": "plain", **os.environ}
    done = subprocess.run([sys.executable, "-m", "pytest", *tests], cwd=ROOT, env=environment, check=False)
    return 0 if done.returncode == NO_TESTS else done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
