"""Before a commit, the tests of what it touches are run, and no others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.places import ROOT

SCRIPT = ROOT / ".ci" / "touched.py"


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("src/coterie/core/rng.py", "tests/core/test_rng.py"),
        ("src/coterie/__main__.py", "tests/test_main.py"),
        ("tests/core/test_rng.py", "tests/core/test_rng.py"),
        ("mkdocs_hooks.py", "tests/test_mkdocs_hooks.py"),
        ("tests/places.py", None),
        ("src/coterie/methods/absent.py", None),
    ],
)
def test_which_tests_a_file_has(path: str, tests: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import touched

    found = touched.tests_of(path)
    assert (found and found.as_posix()) == tests


def test_files_without_tests_pass_at_once() -> None:
    assert subprocess.run([sys.executable, SCRIPT, "tests/places.py"], timeout=60, check=False).returncode == 0
