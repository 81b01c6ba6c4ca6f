"""Callbacks by name or import path, with their options, or as objects from Python; `callbacks.py` calls them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from coterie.core.errors import ConfigError
from coterie.core.extensions import with_options
from coterie.core.options import parameters, with_given_options

KIND = "callback"
OWN: Mapping[str, Any] = {}  # the library has none with a name
FROM_PYTHON = " (from Python)"  # how config.toml marks one that it cannot name


class _Function:
    """A function as a callback."""

    def __init__(self, function: Any) -> None:
        self.on_round_end = function


def names_of(given: Sequence[Any] | str | None) -> list[str] | None:
    """Return what config.toml has of callbacks, some of which may be objects from Python."""
    if given is None:
        return None
    items = [given] if isinstance(given, str) else list(given)
    return [each if isinstance(each, str) else f"{_name(each)}{FROM_PYTHON}" for each in items]


def make(given: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the callbacks of one run by name.

    Args:
        given: names with options, classes, functions, or objects.

    Raises:
        ConfigError: there is no such callback, it does not have these options, or is none; it lists every problem.
    """
    found, problems = [], list[str]()
    for each in given:
        name = each if isinstance(each, str) else _name(each)
        try:
            found.append((name, _made(name, _ready(each))))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return found


def problems_of(given: Sequence[str]) -> list[str]:
    """Return what is wrong with the callbacks that a configuration names, without making one."""
    problems: list[str] = []
    for name in given:
        try:
            if not name.endswith(FROM_PYTHON):
                _ready(name)
        except ConfigError as error:
            problems += error.problems
    return problems


def own_to_one_run(given: Sequence[Any]) -> list[str]:
    """Return the names of callbacks that are objects, which several runs cannot share."""
    return [_name(each) for each in given if hasattr(each, "on_round_end") and not isinstance(each, type)]


def _ready(given: Any) -> Any:
    """Return a callback, or what makes one: a class or a function, with its options."""
    if not isinstance(given, str):
        return given
    if given.endswith(FROM_PYTHON):
        raise ConfigError([f"callback '{given}': it has no name, so give it again in Python, with callbacks=[...]"])
    found, words = with_options(KIND, given, OWN)
    target = found.func if isinstance(found, functools.partial) else found
    if not isinstance(target, type):
        first = next(iter(parameters(found)), None)
        if not inspect.isroutine(target) or first is None:
            raise ConfigError([f"callback '{given}' is neither a class nor a function of the run"])
        return with_given_options(KIND, given, found, words, (first,))
    if not hasattr(target, "on_round_end"):
        raise ConfigError([f"callback '{given}': its class has no on_round_end(self, run)"])
    return with_given_options(KIND, given, found, words)


def _made(name: str, ready: Any) -> Any:
    target = ready.func if isinstance(ready, functools.partial) else ready
    if isinstance(target, type):
        try:
            return ready()
        except (TypeError, ValueError) as error:
            raise ConfigError([f"callback '{name}': {error}"]) from error
    if hasattr(ready, "on_round_end"):
        return ready
    if not callable(ready):
        raise ConfigError([f"callback '{name}' has no on_round_end(run) and is no function"])
    return _Function(ready)


def _name(given: Any) -> str:
    target = given.func if isinstance(given, functools.partial) else given
    named = target if isinstance(target, type) or inspect.isroutine(target) else type(target)
    return str(named.__qualname__)
