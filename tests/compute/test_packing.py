"""Lanes lose nobody's steps, and clients that share them are trained as if each had its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from coterie.compute.compiled import compiling
from coterie.compute.packing import balance, best_width, schedule
from coterie.core import tree
from coterie.core.batches import Batch, Batches
from coterie.core.optimizers import SGD
from coterie.core.scan import scan
from coterie.core.task import Task
from coterie.core.training import train
from coterie.engine.stacked import stacked

SIZES = [7, 0, 2, 5, 1, 3]


@pytest.mark.parametrize("lanes", [1, 2, 3, 6, 9])
def test_every_client_takes_its_steps_in_order_on_one_lane(lanes: int) -> None:
    plan = schedule(SIZES, lanes)
    for client, size in enumerate(SIZES):
        at = np.argwhere(plan.live & (plan.client == client))
        assert len(at) == size
        assert len(set(at[:, 0])) <= 1
        assert plan.place[tuple(at.T)].tolist() == list(range(size))
    assert plan.client.shape == (lanes, max(7, -(-18 // lanes)))
    assert {client for _, client in plan.last} | {t.leaves for ts in plan.turns.values() for t in ts} == {0, 2, 3, 4, 5}


def test_piles_are_even_and_none_is_too_large() -> None:
    assert balance([5, 4, 3, 2], 2) == [[0, 3], [1, 2]]
    assert balance([9, 1, 1, 1], 2, most=2) == [[0, 3], [1, 2]]
    assert max(map(len, balance([1] * 7, 3, most=3))) == 3


def test_as_few_lanes_as_do_not_take_longer() -> None:
    assert best_width([10, 5, 5], 3) == 2
    assert best_width([4, 4, 4], 3) == 3
    assert best_width([4, 4, 4, 4], 3) == 2  # two and two, not three and one
    assert best_width([100, *[1] * 50], 51) <= 4


def data() -> Batches:
    """Six clients with `SIZES` minibatches in two epochs of four; those of the third come late."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 5, generator=generator), torch.randint(0, 3, (40,), generator=generator)
    index = torch.randint(0, 40, (6, 2, 4, 3), generator=generator)
    mask = torch.zeros(6, 8, 3)
    for client, size in enumerate(SIZES):
        mask[client, :size] = 1
    mask[2] = mask[2].flip(0)
    key = torch.randint(0, 99, (6, 2, 4), generator=generator)
    return Batches(x, y, index, mask.reshape(6, 2, 4, 3), key, torch.full((6,), 9.0))


@pytest.mark.parametrize(("compiled", "width"), [(False, None), (False, 1), (False, 2), (True, 2), (True, 8)])
def test_sharing_lanes_changes_nothing(compiled: bool, width: int | None) -> None:
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), "classification")
    params = tree.map(lambda leaf: leaf + 0.1 * torch.randn(6, *leaf.shape), task.init())
    before, batches = tree.clone(params), data()

    def one(params: Any, batches: Batches) -> Any:
        return train(task, SGD(0.1, momentum=0.5), params, batches)

    with compiling(compiled, width):
        got = stacked(one, (params,), batches)
    for client in range(6):
        own = Batches(batches.x, batches.y, *(leaf[client] for leaf in batches[2:6]))
        expected = one(tree.rows(params, client), own)
        for ours, theirs in zip(tree.leaves(tree.rows(got, client)), tree.leaves(expected), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(params), tree.leaves(before), strict=True))


def test_a_carry_may_show_what_is_not_its_own() -> None:
    """A step may give back what it was given beside, one value twice, or one for all: the next client gets its own."""

    def step(carry: Any, aux: Any, batch: Batch) -> Any:
        return aux, carry[0] + aux, carry[0] + aux, torch.zeros(())

    def one(start: Tensor, aux: Tensor, batches: Batches) -> Any:
        return scan(step, (start, start, start, start.sum()), aux, batches)

    start, aux, batches = torch.arange(6.0)[:, None], 10 * torch.arange(6.0)[:, None], data()
    with compiling(False, 2):
        got = stacked(one, (start, aux), batches)
    for client in range(6):
        own = Batches(batches.x, batches.y, *(leaf[client] for leaf in batches[2:6]))
        for ours, theirs in zip(got, one(start[client], aux[client], own), strict=True):
            assert torch.equal(ours[client], theirs)
    assert torch.equal(aux, 10 * torch.arange(6.0)[:, None])
