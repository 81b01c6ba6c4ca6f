"""Tests mirror the source: a module's tests are where its name says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.places import ROOT

SOURCE = ROOT / "src" / "coterie"
TESTS = ROOT / "tests"
# What is about no single module, and what it is about.
ABOUT_MORE = {
    "test_benchmarks": "benchmarks/",
    "test_docs": "docs/ and README.md",
    "test_environments": "machines without a compiler, a private name or a home",
    "test_examples": "examples/",
    "test_layout": "this folder",
    "test_many_clients": "benchmarks/many_clients.py",
    "test_side_effects": "what a run leaves of its host process",
    "cli/test_app": "the command line as a whole",
    "cli/test_silos": "commands on sites' own files",
    "deploy/test_end_to_end": "a federation from its first command to a site's model",
    "deploy/test_equality": "deployment equals simulation",
    "deploy/test_faults": "sites and servers that die",
    "deploy/test_guide": "docs/deploy.md",
    "experiment/take_home/test_silos": "what a site with a file of its own takes home",
    "models/test_models": "every network that has a name",
    "report/test_browser": "the page in a real browser",
    "report/test_report": "the whole page",
    "testing/test_defects": "methods that break the laws",
}


def mirrored(test: Path) -> list[Path]:
    """Where the module, package or command may be that a test file is named after."""
    name = test.stem.removeprefix("test_")
    folder = SOURCE / test.parent.relative_to(TESTS)
    return [folder / f"{name}.py", folder / name / "__init__.py", folder / f"__{name}__.py"]


@pytest.mark.parametrize("test", sorted(TESTS.rglob("test_*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_a_test_file_is_named_after_a_module(test: Path) -> None:
    name = str(test.relative_to(TESTS).with_suffix(""))
    found = any(path.exists() for path in mirrored(test))
    assert found != (name in ABOUT_MORE), f"{name}: {'list it in ABOUT_MORE' if not found else 'it is in ABOUT_MORE'}"
