"""When rounds are written: not more often than it is worth."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coterie.storage import journal
from coterie.storage.journal import REST_PER_WRITE, SECONDS_BETWEEN_WRITES, Journal


class Folder:
    """Writing takes as long as it is told."""

    def __init__(self, clock: list[float], takes: float) -> None:
        self.clock, self.takes, self.rounds, self.saved = clock, takes, list[int](), list[int]()

    def append_lines(self, lines: list[bytes]) -> None:
        self.rounds += [json.loads(line)["round"] for line in lines]

    def save(self, number: int, state: Any, best: int | None) -> None:
        self.clock[0] += self.takes
        self.saved.append(number)


def written(monkeypatch: pytest.MonkeyPatch, rounds: int, seconds: float, takes: float) -> Folder:
    clock = [0.0]
    monkeypatch.setattr(journal.time, "monotonic", lambda: clock[0])
    folder = Folder(clock, takes)
    kept: Any = Journal(folder, 1, 0, None)  # type: ignore[arg-type]
    for number in range(1, rounds + 1):
        clock[0] += seconds
        kept.add({"round": number}, "state", None, None, last=number == rounds)
    assert folder.rounds == list(range(1, rounds + 1)), "no record is left out"
    return folder


def test_short_rounds_are_written_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(monkeypatch, 20, SECONDS_BETWEEN_WRITES / 4, 0.0).saved == [4, 8, 12, 16, 20]


def test_long_rounds_are_written_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(monkeypatch, 5, 2 * SECONDS_BETWEEN_WRITES, 0.0).saved == [1, 2, 3, 4, 5]


def test_writing_takes_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing takes a tenth of a round here: each time, as many rounds pass as make it a fiftieth of the time."""
    assert written(monkeypatch, 16, 10 * SECONDS_BETWEEN_WRITES, SECONDS_BETWEEN_WRITES).saved == [
        1,
        1 + REST_PER_WRITE // 10,
        1 + 2 * (REST_PER_WRITE // 10),
        16,
    ]


def test_every_round_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with journal.at_once():
        assert written(monkeypatch, 4, 0.1, 5.0).saved == [1, 2, 3, 4]
