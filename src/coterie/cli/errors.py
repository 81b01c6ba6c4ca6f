"""Turns errors into messages and exit codes, never a stack trace.

Where the error is in the user's own code (a method, a model, a loss), the message begins with the user's line.
The exit code is 2 for a wrong configuration (the message lists all problems at once), 1 for any other problem that the
user can solve, and 130 after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import typer

from coterie.cli.console import say, stderr
from coterie.core.errors import ConfigError, CoterieError, CoterieWarning
from coterie.core.user_code import explain

T = TypeVar("T")
DEBUG_ADVICE = "With --debug, breakpoint() stops there, and the whole traceback is shown."


class StopMessage:
    """What to print when the user stops the command with Ctrl-C; commands set `advice` as they progress."""

    advice = "Nothing was written."
    debug = False  # whether the run was asked for with --debug


@contextlib.contextmanager
def report_errors() -> Iterator[StopMessage]:
    """Print errors and warnings raised in the block, and exit with the code for them.

    Yields:
        The message to print if the user presses Ctrl-C.
    """
    stopped = StopMessage()
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            yield stopped
        except ConfigError as error:
            many = len(error.problems) > 1
            _print(f"{len(error.problems)} problems:\n{error}" if many else error.problems[0], "red")
            raise typer.Exit(2) from None
        except CoterieError as error:
            _print(str(error), "red")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            _print(f"Stopped. {stopped.advice}", "yellow")
            raise typer.Exit(130) from None
        except Exception as error:
            words = "" if isinstance(error, typer.Exit | typer.Abort) else explain(error)
            if not words:
                raise
            _print(words, "red")
            _print("".join(traceback.format_exception(error)).strip() if stopped.debug else DEBUG_ADVICE, "dim")
            raise typer.Exit(1) from None


def with_problems(problems: list[str], make: Callable[[], T]) -> T:
    """Return `make()`.

    Raises:
        ConfigError: `problems` is not empty, or `make` found problems; all of them are in the error.
    """
    try:
        made = make()
    except ConfigError as error:
        raise ConfigError(list(dict.fromkeys([*problems, *error.problems]))) from None
    if problems:
        raise ConfigError(problems)
    return made


def _print(text: str, colour: str) -> None:
    say(stderr(), text, colour)


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    if issubclass(category, CoterieWarning):
        _print(f"Note: {message}", "yellow")
    else:
        _print(warnings.formatwarning(message, category, filename, lineno, line).strip(), "dim")
