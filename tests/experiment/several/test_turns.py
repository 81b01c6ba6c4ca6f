"""Functions in turns: answered together, and all of them end with the first error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from coterie.core.errors import CoterieError
from coterie.experiment.several.turns import RunEnd, RunThread, take_turns


def asks(name: str, times: int, fails: bool = False) -> Callable[[RunThread], str]:
    def work(thread: RunThread) -> str:
        for _ in range(times):
            thread.do([lambda: None])
        if fails:
            raise CoterieError(f"{name} fails")
        return name

    return work


def test_all_are_answered_together_until_each_has_ended() -> None:
    seen: list[list[bool]] = []

    def answer(asked: Any) -> list[Any]:
        seen.append([isinstance(each, RunEnd) for each in asked])
        return [None] * len(asked)

    assert take_turns([asks("a", 1), asks("b", 3), asks("c", 2)], answer) == ["a", "b", "c"]
    assert seen == [[False, False, False], [True, False, False], [True, False, True]]


def test_the_first_error_is_raised_in_all_and_told_as_it_is() -> None:
    ends: list[str] = []

    def noted(thread: RunThread) -> None:
        try:
            asks("patient", 5)(thread)
        except CoterieError as error:
            ends.append(str(error))
            raise CoterieError(f"again: {error}") from error

    with pytest.raises(CoterieError, match=r"^b fails$"):
        take_turns([noted, asks("b", 1, fails=True)], lambda asked: [None] * len(asked))
    assert ends == ["b fails"]
