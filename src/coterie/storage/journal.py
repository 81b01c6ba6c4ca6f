"""What a run writes as it goes: the records of its rounds, and checkpoints of the last and the best one.

A round can be repeated bit for bit, so losing one costs its own time and nothing else. Short rounds are therefore
written together. A process that is killed loses at most the last `SECONDS_BETWEEN_WRITES`, or `REST_PER_WRITE` times
what the last writing took, if that is longer. A process that is interrupted, or that fails, loses nothing. Rounds that
take longer are written one by one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from coterie.storage.run_folder import RunFolder, line_of
from coterie.storage.state import State

SECONDS_BETWEEN_WRITES = 2.0
REST_PER_WRITE = 50  # times as long as it took: so all writing takes a fiftieth of the time at most


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Write every round in the block when it ends, however short it was."""
    global SECONDS_BETWEEN_WRITES
    before, SECONDS_BETWEEN_WRITES = SECONDS_BETWEEN_WRITES, 0.0
    try:
        yield
    finally:
        SECONDS_BETWEEN_WRITES = before


class Journal:
    """Writes the rounds of a run to its folder, not more often than it is worth.

    Args:
        folder: the run folder; None: nothing is written.
        every: a checkpoint is due after every so many rounds, and after each that is the best so far.
        done: the last round that the folder has a checkpoint of.
        best: the best round so far.
    """

    def __init__(self, folder: RunFolder | None, every: int, done: int, best: int | None) -> None:
        self.folder, self.every = folder, every
        self._lines: list[bytes] = []  # records of rounds that are not in the folder yet
        self._states: dict[int, State] = {}  # those after the last and after the best round
        self._saved = {done, best}  # the rounds that there are checkpoints of
        self._best = best
        self._due, self._written, self._took = False, time.monotonic(), 0.0

    def add(self, record: dict[str, Any], state: State, best: int | None, kept: State | None, last: bool) -> None:
        """Take in a round that is over, and write if it is time.

        Args:
            record: the line of rounds.jsonl.
            state: the state after this round.
            best: the best round so far.
            kept: the state after that one.
            last: the run ends with this round, so it is written at any rate.
        """
        number = record["round"]
        if self.folder:
            self._lines.append(line_of(record))
        self._best = best
        self._states = ({} if best is None or kept is None else {best: kept}) | {number: state}
        self._due = self._due or last or best == number or number % self.every == 0
        rest = max(SECONDS_BETWEEN_WRITES, REST_PER_WRITE * self._took) if SECONDS_BETWEEN_WRITES else 0.0
        if last or time.monotonic() - self._written >= rest:
            self.write(checkpoint=self._due)

    def write(self, checkpoint: bool = True) -> None:
        """Write all that is not in the folder yet; without `checkpoint`, the records only."""
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
