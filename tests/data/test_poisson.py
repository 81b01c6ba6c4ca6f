"""Minibatches that are drawn by chance, as the accountant of privacy counts on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import poisson

from coterie.core.batches import IS_DRAWN
from coterie.data import from_clients
from coterie.data.minibatches import OVERFLOW, Plan, draw, poisson_width


def federation(*sizes):
    made = {f"c{i}": (torch.arange(2.0 * n)[:, None], torch.arange(2 * n) % 2) for i, n in enumerate(sizes)}
    return from_clients(made, validation=0.25, test=0.25, seed=0)


def test_every_example_is_in_every_minibatch_with_the_same_chance_alone():
    plan, data = Plan(8, 1, steps=4000, poisson=True), federation(40)
    drawn = draw(data, [0], plan, seed=1, purpose="minibatches", round=1)
    there = drawn.mask[0, 0] > IS_DRAWN
    member = torch.zeros(4000, int(data.train[0].max()) + 1)
    for step in range(4000):
        rows = drawn.index[0, 0, step][there[step]]
        assert len(rows.unique()) == len(rows)
        member[step, rows] = 1
    member = member[:, torch.from_numpy(np.sort(data.train[0]))]
    rate = 8 / member.shape[1]
    spread = (rate * (1 - rate) / 4000) ** 0.5
    assert (member.mean(0) - rate).abs().max() < 4.5 * spread
    pairs = torch.corrcoef(member.T) - torch.eye(member.shape[1])
    assert pairs.abs().max() < 5.5 / 4000**0.5  # who is drawn says nothing of who else is: not so without replacement
    assert member.sum(1).var() == pytest.approx(8 * (1 - rate), rel=0.1)


def test_a_minibatch_of_nobody_is_a_step_all_the_same():
    drawn = draw(federation(40), [0], Plan(1, 1, steps=200, poisson=True), seed=1, purpose="m", round=1)
    numbers = (drawn.mask[0, 0] > IS_DRAWN).sum(-1)
    assert (numbers == 0).any()
    assert drawn.mask[0, 0].any(-1).all()
    assert (drawn.mask[0, 0][numbers == 0].sum(-1) < 1e-6).all()


def test_steps_are_those_of_ordinary_minibatches_and_everyone_comes_once():
    data = federation(40, 10, 3)
    for plan in (Plan(8, 2, poisson=True), Plan(8, 1, steps=5, poisson=True)):
        drawn = draw(data, [0, 1, 2], plan, seed=1, purpose="m", round=1)
        for i, own in enumerate(data.train):
            steps = drawn.mask[i].flatten(0, 1).any(-1).sum()
            assert steps == plan.num_steps(len(own))
            index, mask = (part[i].flatten() for part in drawn.everyone)
            assert sorted(index[mask > 0].tolist()) == sorted(own.tolist())
        alone = draw(data, [1], plan, seed=1, purpose="m", round=1)
        n = alone.mask.shape[2]
        assert torch.equal(alone.index[0] * alone.mask[0], (drawn.index[1] * drawn.mask[1])[:, :n])


def test_a_client_no_larger_than_a_minibatch_is_drawn_whole():
    drawn = draw(federation(10), [0], Plan(32, 3, poisson=True), seed=1, purpose="m", round=1)
    assert (drawn.mask[0].sum(-1) == len(federation(10).train[0])).all()


@pytest.mark.parametrize("size", [1, 8, 64, 500])
def test_there_is_room_for_more_than_anybody_will_see(size):
    width = poisson_width(size, 10**6)
    assert poisson.sf(width, size) <= OVERFLOW < poisson.sf(width - 3, size)
    assert poisson_width(size, size - 1) == size - 1
