"""Tests mirror the source, a module's tests being where its name says; and method files do not repeat each other."""

from __future__ import annotations

import ast
import re
import tokenize
import tomllib
from itertools import combinations
from pathlib import Path

import pytest

from tests.places import ROOT

SHARED_LINES = 8  # so many lines in a row may not stand in two method files
SOURCE = ROOT / "src" / "coterie"
TESTS = ROOT / "tests"
# What is about no single module, and what it is about.
ABOUT_MORE = {
    "testing/test_laws_under_settings": "laws under schedules, clipping and the server's optimiser",
    "data/test_poisson": "minibatches that are drawn by chance",
    "deploy/test_private_sites": "differential privacy at sites",
    "test_benchmarks": "benchmarks/",
    "test_docs": "docs/ and README.md",
    "test_docstrings": "examples in docstrings",
    "test_environments": "machines without a compiler, a private name or a home",
    "test_examples": "examples/",
    "test_layout": "this folder",
    "test_mkdocs_hooks": "mkdocs_hooks.py and mkdocs.yml",
    "test_many_clients": "benchmarks/many_clients.py",
    "test_notebooks": "docs/notebooks and .ci/notebooks.py",
    "test_release": "the wheel and the source archive",
    "test_side_effects": "what a run leaves of its host process",
    "test_touched": ".ci/touched.py",
    "cli/test_app": "the command line as a whole",
    "cli/test_silos": "commands on sites' own files",
    "deploy/test_end_to_end": "a federation from its first command to a site's model",
    "deploy/test_early_stop": "the end of a federation that stops early",
    "deploy/test_equality": "deployment equals simulation",
    "deploy/test_disk": "full disks, damaged files and kills",
    "deploy/test_faults": "sites and servers that die",
    "deploy/test_hostile": "false messages of every kind",
    "deploy/test_soak": "many rounds with many sites",
    "deploy/test_guide": "docs/deploy.md",
    "compute/test_pace": "learning rates with a schedule in compiled steps",
    "methods/test_newcomers": "which part of a model newcomers train",
    "methods/test_no_examples": "every method without an example in a round",
    "methods/test_schedules": "every method under a schedule",
    "methods/test_told_losses": "what every method tells of its training",
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


def code_lines(path: Path) -> list[str]:
    """Return a file's lines without blank ones, comments, imports, docstrings, and lines that only close brackets."""
    text = path.read_text()
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        string = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if string or isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= set(range(node.lineno, node.end_lineno + 1))
    lines = dict(enumerate(text.splitlines(), 1))
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                lines[token.start[0]] = lines[token.start[0]][: token.start[1]]
    return [
        " ".join(line.split()) for number, line in lines.items() if number not in left_out and line.strip(" ()[]{},:")
    ]


def shared_lines(one: list[str], other: list[str]) -> list[str]:
    """Return the first run of `SHARED_LINES` lines that stand in both, if there is one."""
    runs = {tuple(other[start : start + SHARED_LINES]) for start in range(len(other) - SHARED_LINES + 1)}
    found = (tuple(one[start : start + SHARED_LINES]) for start in range(len(one) - SHARED_LINES + 1))
    return list(next((run for run in found if run in runs), ()))


def test_no_two_method_files_share_eight_lines() -> None:
    files = {path.stem: code_lines(path) for path in sorted((SOURCE / "methods").glob("*.py"))}
    assert len(files["fedavg"]) >= SHARED_LINES
    for one, other in combinations(files, 2):
        shared = shared_lines(files[one], files[other])
        assert not shared, f"{one}.py and {other}.py share these lines: put them into parts/\n" + "\n".join(shared)


def test_shared_lines_are_found_whatever_stands_between_them() -> None:
    """So that the test above can fail: a file repeats itself, and a comment or a docstring does not hide that."""
    lines = code_lines(SOURCE / "methods" / "fedavg.py")
    assert shared_lines(["x = 1", *lines[2 : 2 + SHARED_LINES]], lines) == lines[2 : 2 + SHARED_LINES]
    assert not shared_lines(lines[: SHARED_LINES - 1], lines)
    assert not any(line.startswith(("#", "import", "from", '"')) for line in lines)


def test_tests_of_one_group_run_in_one_process(request: pytest.FixtureRequest) -> None:
    """Under pytest 9.2, pytest-xdist 3.8 dealt out every test by itself: both processes compiled the same steps."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("tests are not dealt out in groups (pytest -n 2 --dist loadgroup)")
    items = request.session.items
    alone = [item for item in items if item.get_closest_marker("xdist_group") and "@" not in item.nodeid]
    assert not alone, (
        f"pytest-xdist ignores the groups of {len(alone)} tests under pytest {pytest.__version__}: install the "
        "versions that pyproject.toml names (`make test` does)"
    )


def test_workflows_call_what_exists():
    """They are not executed here: at least their files, tests and extras are there, in jobs that can begin."""
    yaml = pytest.importorskip("yaml")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    called = ""
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert True in told, f"{path.name} says when it runs ('on', which YAML takes for a boolean)"
        for job in told["jobs"].values():
            assert job["runs-on"]
            assert all("uses" in step or "run" in step for step in job["steps"])
            called += "".join(step.get("run", "") + "\n" for step in job["steps"])
    assert {extra for some in re.findall(r'"\.\[([\w,]+)\]"', called) for extra in some.split(",")} <= extras.keys()
    paths = set(re.findall(r"(?:tests/|\.ci/)[\w./]*", called))
    assert len(paths) >= 5
    assert all((ROOT / path).exists() for path in paths)
    for file, test in re.findall(r"(tests/[\w./]+)::(\w+)", called):
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8")
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    assert all(hook["entry"].startswith(".venv/bin/") for hook in hooks)
    assert all((ROOT / word).exists() for hook in hooks for word in hook["entry"].split() if word.startswith(".ci/"))
