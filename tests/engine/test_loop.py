"""The reference engine calls a function for one client after another."""

import torch

from coterie.core.batches import Batches
from coterie.engine.loop import global_seed, loop


def batches(clients=3, keys=None):
    positions = torch.arange(clients).reshape(clients, 1, 1, 1)
    key = positions[..., 0] if keys is None else torch.tensor(keys).reshape(clients, 1, 1)
    pool = 10 * torch.arange(float(clients))
    return Batches(pool, pool, positions, torch.ones(clients, 1, 1, 1), key, torch.ones(clients))


def test_every_client_sees_its_own_row_and_its_own_minibatches():
    def fn(state, batches):
        assert batches.index.shape == (1, 1, 1), "no client axis"
        return {"sum": state["w"] + batches.x[batches.index].sum()}

    assert loop(fn, ({"w": torch.tensor([1.0, 2.0, 3.0])},), batches())["sum"].tolist() == [1.0, 12.0, 23.0]


def test_random_numbers_depend_on_the_clients_key_and_the_callers_are_left_alone():
    def draws(keys):
        return loop(lambda _: torch.rand(4), (), batches(keys=keys))

    before = torch.get_rng_state()
    first, second = draws([5, 6, 7]), draws([7, 5, 6])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second[[1, 2, 0]])
    assert not torch.equal(first[0], first[1])


def test_a_client_without_minibatches_has_a_seed():
    assert global_seed(torch.empty(0, 0, dtype=torch.int64)) == 0
