"""What a search leaves on disk, and is continued from.

search.json      what is searched: settings, ranges, rungs      chosen/METHOD/   the runs of what was chosen, with tests
search.jsonl     one line a candidate and rung                  METHOD.toml      the settings that were chosen
candidates/METHOD-NUMBER/    the state of a candidate that may go on; gone when the search is over
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coterie.core.errors import CheckpointError
from coterie.storage import files
from coterie.storage.run_folder import RunFolder, line_of, safe_name

FORMAT = 1


class Point(NamedTuple):
    """Scores after a round: means over the clients' validation examples."""

    round: int
    value: float  # of the metric that selects
    loss: float


@dataclasses.dataclass(frozen=True)
class Entry:
    """One candidate's training in one rung. A candidate that diverged has no points from then on."""

    method: str
    candidate: int
    rung: int
    values: dict[str, Any]
    curve: tuple[Point, ...]
    seconds: float
    diverged: str = ""  # why training stopped; empty: it did not


class SearchFolder:
    """Reads and writes the folder of a search."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, about: dict[str, Any]) -> list[Entry]:
        """Begin a search, or continue it: return what was done already.

        Raises:
            CheckpointError: the folder holds another search, or something else.
        """
        about = json.loads(files.to_json({"format": FORMAT, **about}))
        path = self.path / "search.json"
        if not path.exists():
            if (self.path / "config.toml").exists():
                raise CheckpointError(f"'{self.path}' already holds a run: name another folder with --out")
            files.write_json(path, about)
            return []
        there = files.read_json(path)
        if there != about:
            different = [key for key in {**about, **there} if about.get(key) != there.get(key)]
            listed = "; ".join(f"{key}: {_difference(there.get(key), about.get(key))}" for key in different)
            raise CheckpointError(f"'{self.path}' holds another search ({listed}): name another folder with --out")
        entries = read_entries(self.path)
        files.write_text(self._lines, b"".join(map(_line, entries)).decode())  # without a line that was cut off
        return entries

    @property
    def _lines(self) -> Path:
        return self.path / "search.jsonl"

    def add(self, entries: Sequence[Entry]) -> None:
        """Note that candidates have done a rung: all of them, or none if that fails."""
        files.append(self._lines, [_line(entry) for entry in entries])

    def states(self, method: str, candidate: int) -> RunFolder:
        """Return where the states of a candidate are kept."""
        return RunFolder(self.path / "candidates" / f"{safe_name(method)}-{candidate}")

    def forget(self, method: str, candidate: int) -> None:
        """Delete the states of a candidate that does not go on."""
        shutil.rmtree(self.states(method, candidate).path, ignore_errors=True)

    def finish(self) -> None:
        """Delete what only a search that goes on needs."""
        shutil.rmtree(self.path / "candidates", ignore_errors=True)


def read_entries(path: Path) -> list[Entry]:
    """Read the journal of a search up to a line that was being written when it stopped.

    Raises:
        CheckpointError: a line is not what a search writes.
    """
    file = path / "search.jsonl"
    found: list[Entry] = []
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            break
        try:
            record = json.loads(line)
            curve = tuple(Point(int(at), _float(value), _float(loss)) for at, value, loss in record.pop("curve"))
            found.append(Entry(curve=curve, **record))
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"'{file}' line {number} cannot be read: {error}") from error
    return found


def _line(entry: Entry) -> bytes:
    return line_of({**dataclasses.asdict(entry), "curve": [list(point) for point in entry.curve]})


def _float(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _difference(there: Any, here: Any) -> str:
    """Say where two values differ: of two tables, only the keys that do."""
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [key for key in {**here, **there} if here.get(key) != there.get(key)]
        return ", ".join(f"{key} {_difference(there.get(key), here.get(key))}" for key in keys)
    return f"{there!r}, not {here!r}"
