"""Proposals: inside the ranges, spread evenly at first, the same for every method, and better where scores are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from coterie.experiment.tuning.propose import SPREAD, importances, propose
from coterie.experiment.tuning.space import Numbers, Options, Space

SPACE: Space = {
    "lr": Numbers(1e-3, 1, log=True),
    "lam": Numbers(0, 4, log=False),
    "clusters": Numbers(2, 5, log=True, whole=True),
    "word": Options(("a", "b")),
}


def test_the_first_ones_lie_evenly_and_at_the_same_step_sizes_for_every_method() -> None:
    found = [propose(SPACE, [], number, 3, "ditto") for number in range(1, SPREAD + 1)]
    other = [propose({"lr": SPACE["lr"]}, [], number, 3, "local") for number in range(1, SPREAD + 1)]
    assert [values["lr"] for values in found] == [values["lr"] for values in other]
    for values in found:
        assert all(SPACE[name].holds(value) for name, value in values.items())
        assert isinstance(values["clusters"], int)
    order = np.array([math.log(values["lr"] / 1e-3) / math.log(1e3) for values in found])
    places = np.sort(order)
    assert np.diff([*places, places[0] + 1]).max() < 0.4  # no gap of half the range
    assert (
        np.diff([*np.sort(order[:3]), order[:3].min() + 1]).max() < 0.5
    )  # nor after the first three, if there are few
    assert {values["word"] for values in found} == {"a", "b"}
    assert propose(SPACE, [], 1, 4, "ditto") != found[0]


def test_later_ones_are_near_the_best_and_depend_on_the_scores_only() -> None:
    tried = [(propose(SPACE, [], number, 0, "x"), 0.0) for number in range(1, SPREAD + 1)]
    tried = [(values, -abs(math.log10(values["lr"]) + 1)) for values, _ in tried]  # best at 0.1
    tried += [({**tried[0][0], "lr": lr}, -abs(math.log10(lr) + 1)) for lr in (0.08, 0.1, 0.12, 0.002, 0.9)]
    found = [propose(SPACE, tried, number, seed, "x")["lr"] for seed in range(5) for number in (11, 12)]
    assert np.median(np.abs(np.log10(found) + 1)) < 0.5
    assert propose(SPACE, tried, 11, 0, "x") == propose(SPACE, tried, 11, 0, "x")
    lost = [*tried, ({**tried[0][0], "lr": 0.5}, -math.inf), ({**tried[0][0], "lr": 50.0}, 9.0)]  # outside the space
    assert SPACE["lr"].holds(propose(SPACE, lost, 13, 0, "x")["lr"])


def test_what_matters_is_told_from_what_does_not() -> None:
    draw = np.random.default_rng(0)
    space: Space = {"lr": Numbers(1e-3, 1, log=True), "lam": Numbers(0, 4, log=False)}
    tried = [({"lr": float(10 ** (3 * u - 3)), "lam": float(4 * v)}, float(u)) for u, v in draw.random((30, 2))]
    found = importances(space, tried, seed=0)
    assert found["lr"] > 0.8
    assert sum(found.values()) == pytest.approx(1)
    assert importances(space, tried[:3], seed=0) == {}


def test_candidates_at_the_same_time_are_not_alike() -> None:
    space: Space = {"lr": Numbers(1e-3, 1, log=True)}
    tried = [({"lr": float(lr)}, -abs(math.log10(lr) + 1)) for lr in np.geomspace(1e-3, 1, 9)]
    distances = []
    for seed in range(8):
        first = propose(space, tried, 9, seed, "x")
        beside = propose(space, tried, 10, seed, "x", [first] * 4)
        alone = propose(space, tried, 10, seed, "x")
        distances.append([abs(math.log10(each["lr"] / first["lr"])) for each in (beside, alone)])
        assert propose(space, tried, 10, seed, "x", [first] * 4) == beside
    beside_mean, alone_mean = np.mean(distances, axis=0)
    assert beside_mean > alone_mean
