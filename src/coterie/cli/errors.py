"""How a command ends when it does not finish: with words and an exit code, never a stack trace.

2: the configuration is wrong (everything that is wrong is told); 1: another problem; 130: stopped by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import typer

from coterie.cli.console import say, stderr
from coterie.errors import ConfigError, CoterieError, CoterieWarning

T = TypeVar("T")


class Ending:
    """What to tell a user who stops the command here."""

    advice = "Nothing was written."


@contextlib.contextmanager
def in_words() -> Iterator[Ending]:
    ending = Ending()
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            yield ending
        except ConfigError as error:
            many = len(error.problems) > 1
            _tell(f"{len(error.problems)} things to correct:\n{error}" if many else error.problems[0], "red")
            raise typer.Exit(2) from None
        except CoterieError as error:
            _tell(str(error), "red")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            _tell(f"Stopped. {ending.advice}", "yellow")
            raise typer.Exit(130) from None


def checked(problems: list[str], make: Callable[[], T]) -> T:
    """What `make` makes; its problems are told together with those found before."""
    try:
        made = make()
    except ConfigError as error:
        raise ConfigError(list(dict.fromkeys([*problems, *error.problems]))) from None
    if problems:
        raise ConfigError(problems)
    return made


def _tell(text: str, colour: str) -> None:
    say(stderr(), text, colour)


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    if issubclass(category, CoterieWarning):
        _tell(f"Note: {message}", "yellow")
    else:
        _tell(warnings.formatwarning(message, category, filename, lineno, line).strip(), "dim")
