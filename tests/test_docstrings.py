"""The examples in the docstrings of public names are true, and the main functions have one."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import coterie

MODULES = [coterie]
if importlib.util.find_spec("fcntl"):  # where there is a Flower server
    from coterie import flower

    MODULES.append(flower)

SHOWN = (
    *("attack", "compare", "compare_runs", "compare_tuned", "export", "from_clients", "load", "lora", "metric"),
    *("onboard", "plan", "recommend", "resume", "run", "tune"),
)
SLOW = ("Result.benefit", "attack", "compare", "compare_tuned", "recommend", "tune")  # which train several federations
QUICK: dict[str, Any] = {"model": "linear", "rounds": 2, "engine": "loop", "compile": False, "workers": 1}
OPTIONS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL


def examples() -> list[doctest.DocTest]:
    """Every docstring with an example, of public names and their members."""
    finder, found = doctest.DocTestFinder(exclude_empty=True), []
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value) or inspect.isclass(value):
                made = finder.find(value, name, module=inspect.getmodule(value), globs={})
                found += [test for test in made if test.examples]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the examples run: it holds two finished runs, `first` and `second`."""
    here = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.setenv("COTERIE_BACKEND", "plain")
        for name, method in (("first", "fedavg"), ("second", "ditto")):
            coterie.run(method, "hospitals", out=name, report=False, **QUICK)
        yield here


def marked(test: doctest.DocTest) -> Any:
    return pytest.param(test, id=test.name, marks=[pytest.mark.slow] if test.name in SLOW else [])


@pytest.mark.parametrize("test", [marked(test) for test in examples()])
def test_an_example_is_true(test: doctest.DocTest, folder: Path) -> None:
    told: list[str] = []
    result = doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=told.append)
    assert result.attempted
    assert result.failed == 0, "".join(told)


def test_the_main_functions_have_an_example() -> None:
    assert {test.name for test in examples()} >= set(SHOWN)
    functions = {name for name in coterie.__all__ if inspect.isfunction(getattr(coterie, name))}
    assert functions <= {*SHOWN, "prepare"}  # a new one is shown too
