"""Successive halving: all candidates train for a few rounds, the better third for more, and so on.

    Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization", AISTATS 2016

With T candidates and R rounds, rung k of s trains the best ceil(T / 3^k) candidates until round ceil(R / 3^(s - k)).
A candidate that is promoted goes on from where it was. Every method gets the same rungs, and so the same budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

KEPT = 3  # one of so many is promoted
MOST_RUNGS = 3  # the first trains for at least a ninth of the rounds: fewer would favour large step sizes
LEAST_ROUNDS = 2  # of the first rung


class Rung(NamedTuple):
    """One stage of a search."""

    candidates: int
    rounds: int  # that each has trained for at the end of this rung, from its first round on


def rungs_of(trials: int, rounds: int, *, halving: bool = True) -> tuple[Rung, ...]:
    """Return the rungs of a search with so many candidates, the last of which train for `rounds`.

    Args:
        trials: how many candidates there are.
        rounds: of the longest training.
        halving: without it, all candidates train for all rounds.
    """
    if not halving:
        return (Rung(trials, rounds),)
    stages = 1
    while stages < MOST_RUNGS and trials >= KEPT**stages and rounds >= LEAST_ROUNDS * KEPT**stages:
        stages += 1
    return tuple(Rung(-(-trials // KEPT**k), -(-rounds // KEPT ** (stages - 1 - k))) for k in range(stages))


def rounds_trained(rungs: Sequence[Rung]) -> int:
    """Return how many rounds all candidates train for together."""
    before = [0, *(rung.rounds for rung in rungs)]
    return sum(rung.candidates * (rung.rounds - done) for rung, done in zip(rungs, before, strict=False))
