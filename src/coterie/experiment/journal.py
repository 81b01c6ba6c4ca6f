"""What a run leaves on the disk as it goes: the records of its rounds, and checkpoints of the last and the best one.

A round can be repeated bit for bit, so one that was not written costs its own time and nothing else. Short rounds are
therefore written together: a process that is killed outright loses `PATIENCE` seconds of them at most, or where writing
takes long, `RARELY` times what that took, and one that is interrupted, or fails, loses none. Rounds that take longer
are written one by one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from coterie.experiment.folder import RunFolder, line_of
from coterie.experiment.simulation import State

PATIENCE = 2.0  # seconds
RARELY = 50  # so that all writing takes a fiftieth of the time at most


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Inside, every round is written when it ends, however short it was."""
    global PATIENCE
    before, PATIENCE = PATIENCE, 0.0
    try:
        yield
    finally:
        PATIENCE = before


class Journal:
    def __init__(self, folder: RunFolder | None, every: int, done: int, best: int | None) -> None:
        self.folder, self.every = folder, every
        self._lines: list[bytes] = []  # of rounds that are not in the folder yet
        self._states: dict[int, State] = {}  # of the last and of the best round
        self._saved = {done, best}  # the rounds that there are checkpoints of
        self._best = best
        self._due, self._written, self._took = False, time.monotonic(), 0.0

    def add(self, record: dict[str, Any], state: State, best: int | None, kept: State | None, last: bool) -> None:
        """A round is over. `kept` is the state after the `best` one so far; the `last` one is written at any rate."""
        number = record["round"]
        if self.folder:
            self._lines.append(line_of(record))
        self._best = best
        self._states = ({} if best is None or kept is None else {best: kept}) | {number: state}
        self._due = self._due or last or best == number or number % self.every == 0
        patience = max(PATIENCE, RARELY * self._took) if PATIENCE else 0.0
        if last or time.monotonic() - self._written >= patience:
            self.write(checkpoint=self._due)

    def write(self, checkpoint: bool = True) -> None:
        """All that is not in the folder yet; without `checkpoint`, the records only."""
        if self.folder is None:
            return
        begin = time.monotonic()
        if self._lines:
            self.folder.append_lines(self._lines)
            self._lines = []
        if checkpoint:
            for number, state in sorted(self._states.items()):
                if number not in self._saved:
                    self.folder.save(number, state, self._best)
            self._saved |= self._states.keys()
            self._due = False
        self._written = time.monotonic()
        self._took = self._written - begin
