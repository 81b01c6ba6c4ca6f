"""Find a user's own lines in a traceback: methods, models, losses and data functions that are not part of Coterie."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from coterie.core.errors import CoterieError

LINES_SHOWN = 5  # of a chain of calls within the user's code
NOTE = "The line of your code: "


class Line(NamedTuple):
    """A line that was being run when an exception was raised."""

    file: str
    number: int
    function: str
    code: str

    def where(self) -> str:
        """Return the place in words: 'blend.py, line 12, in local_update'."""
        return f"{self.file}, line {self.number}, in {self.function}"


def user_lines(error: BaseException) -> list[Line]:
    """Return the lines of a user's own code that led to an exception, the innermost first.

    They are those of files that belong neither to Coterie, nor to an installed package, nor to Python. An exception
    that was raised from another one has the lines of both: those of its cause come first.
    """
    found: list[Line] = []
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        frames = traceback.extract_tb(at.__traceback__)
        mine: list[Line] = []
        for frame in frames:
            line = Line(_short(frame.filename), frame.lineno or 0, frame.name, frame.line or "")
            # A comprehension is a call within its own line, and only its function's name would tell it.
            if _is_users(frame.filename) and (not mine or mine[-1][:2] != line[:2]):
                mine.append(line)
        if isinstance(at, SyntaxError) and at.filename and _is_users(at.filename):
            mine.append(Line(_short(at.filename), at.lineno or 0, "the module", (at.text or "").strip()))
        found = [*reversed(mine), *(line for line in found if line not in mine)]
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return found


def in_user_code(error: BaseException) -> str:
    """Return ' (blend.py, line 12, in local_update: `code`)' for a message; empty if no line is the user's."""
    lines = user_lines(error)
    return f" ({lines[0].where()}: `{lines[0].code}`)" if lines else ""


def explain(error: BaseException) -> str:
    """Return what was raised, and the user's lines that led to it, the innermost first; empty if there are none."""
    lines = user_lines(error)
    if not lines:
        return ""
    words = [f"{type(error).__name__} in your code: {error}"]
    for line in lines[:LINES_SHOWN]:
        words += [f"  {'called in ' if len(words) > 1 else ''}{line.where()}", f"    {line.code}"]
    return "\n".join(words)


@contextlib.contextmanager
def naming_users_line() -> Iterator[None]:
    """Add a note to what is raised inside that names the user's line: Python prints it last, below the traceback."""
    try:
        yield
    except CoterieError:
        raise
    except Exception as error:
        lines = user_lines(error)
        if lines and not any(note.startswith(NOTE) for note in getattr(error, "__notes__", ())):
            error.add_note(f"{NOTE}{lines[0].where()}: {lines[0].code}")
        raise


def _short(file: str) -> str:
    """Return a path as short as it can be opened: relative to the current folder, if it is below it."""
    try:
        return str(Path(file).resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file


def _is_users(file: str) -> bool:
    if file.startswith("<") and not file.startswith("<ipython"):
        return False
    path = str(Path(file).resolve()) if not file.startswith("<") else file
    return not path.startswith(tuple(_others()))


@functools.cache
def _others() -> Sequence[str]:
    """Return the folders of code that is not the user's."""
    paths = sysconfig.get_paths()
    folders = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {str(Path(sys.prefix) / "bin"), str(Path(__file__).resolve().parents[1])}
    folders |= {
        str(Path(entry).resolve()) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")
    }
    return sorted(str(Path(folder).resolve()) + os.sep for folder in folders)
