"""Rungs: fewer candidates for more rounds, and a budget that can be counted."""

from __future__ import annotations

from coterie.experiment.tuning.halving import Rung, rounds_trained, rungs_of


def test_a_third_goes_on_twice() -> None:
    assert rungs_of(20, 20) == (Rung(20, 3), Rung(7, 7), Rung(3, 20))
    assert rounds_trained(rungs_of(20, 20)) == 20 * 3 + 7 * 4 + 3 * 13 == 127
    assert rounds_trained(rungs_of(20, 20, halving=False)) == 400


def test_short_or_small_searches_have_fewer_rungs() -> None:
    assert rungs_of(1, 50) == (Rung(1, 50),)
    assert rungs_of(9, 9) == (Rung(9, 3), Rung(3, 9))
    assert rungs_of(9, 5) == (Rung(9, 5),)
    assert rungs_of(4, 90) == (Rung(4, 30), Rung(2, 90))
