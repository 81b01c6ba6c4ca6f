from dataclasses import dataclass, replace

import pytest
import torch

from coterie import testing
from coterie.core import tree
from coterie.core.method import Population
from coterie.core.optimizers import SGD
from coterie.core.rng import torch_generator
from coterie.core.routes import NOBODY, Addressed
from coterie.data.federation import Split
from coterie.methods import FedFomo, Local
from coterie.methods.fedfomo import Own, Server

from .quadratic import DIM, SIZES, STACKED, federation, simulation, task

EVERYBODY = FedFomo(SGD(0.02), models=2, epsilon=0.0)


@dataclass(frozen=True)
class LocalOnTheRest(Local):
    """Local training that withholds as many examples as FedFomo, and does nothing with them."""

    @property
    def withheld_share(self) -> float:
        return 0.2


def parted(sim) -> list[tuple[torch.Tensor, ...]]:
    """Each client's (x, y) that it trains on and (x, y) that it withholds."""
    found = []
    for k in range(len(SIZES)):
        drawn = sim._draw([k], sim.plan, "minibatches", 1)
        trained = drawn.index[0, 0][drawn.mask[0, 0] > 0]
        out = drawn.withheld.index[0, 0][drawn.withheld.mask[0, 0] > 0]
        found.append((drawn.x[trained], drawn.y[trained], drawn.x[out], drawn.y[out]))
    return found


def test_rounds_by_hand():
    """Three clients who hear each other; the weights, means and local steps of six rounds, independently."""
    sim = simulation(EVERYBODY, steps=3)
    data = parted(sim)
    assert [len(each[2]) for each in data] == [3, 4, 6], "a fifth of 15, 20 and 30"
    own = old = [task().init()["weight"].flatten()] * 3
    affinity = torch.zeros(3, 3, dtype=torch.float64)
    met = 0
    for number in range(1, 7):
        sim.train(number, STACKED)
        starts = []
        for i, (_, _, x, y) in enumerate(data):

            def loss(w, x=x, y=y):
                return ((x @ w - y) ** 2).mean()

            raw = torch.zeros(3, dtype=torch.float64)
            for j in range(3) if number > 1 else ():
                raw[j] = max(0.0, float((loss(old[i]) - loss(own[j])) / (own[j] - old[i]).norm()))
            raw = raw if raw.sum() > 0 else torch.eye(3, dtype=torch.float64)[i]
            weights = raw / raw.sum()
            met += int(((weights > 0).sum() > 1).item())
            affinity[i] += weights
            starts.append(sum(weight * each for weight, each in zip(weights, own, strict=True)))
        old, own = starts, []
        for (x, y, _, _), w in zip(data, starts, strict=True):
            for _ in range(3):
                w = w - 0.02 * 2 * x.T @ (x @ w - y) / len(x)
            own.append(w)
        torch.testing.assert_close(sim.state.clients.own["weight"].flatten(1), torch.stack(own), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(sim.state.server.affinity.double(), affinity, rtol=1e-4, atol=1e-6)
    assert met >= 4, "or no mean was one of several models"
    assert torch.equal(sim.views(4, STACKED)["weight"], sim.state.clients.own["weight"])


@pytest.mark.parametrize("rounds", [1, 3])
def test_without_other_models_it_is_local_training(rounds):
    ours = testing.simulate(FedFomo(SGD(0.1), models=0), rounds=rounds)
    alone = testing.simulate(LocalOnTheRest(SGD(0.1)), rounds=rounds)
    testing.same(testing.views(ours), testing.views(alone), "M = 0 and local training differ", tolerance=1e-6)


def test_one_client_is_local_training():
    name = testing.federation().names[1]
    one = replace(testing.federation(), clients={name: testing.federation().clients[name]})
    ours, alone = (
        testing.simulate(method, rounds=3, participants=1, clients=one)
        for method in (FedFomo(SGD(0.1)), LocalOnTheRest(SGD(0.1)))
    )
    testing.same(testing.views(ours), testing.views(alone), "alone and local training differ", tolerance=1e-6)


def test_a_client_with_one_example_withholds_nothing_and_keeps_its_own_model():
    data = federation()
    small = data.split(0)
    clients = {**data.clients, "client-0": Split(small.train[:1], small.validation, small.test)}
    sim = simulation(EVERYBODY, steps=3)
    sim.federation = replace(data, clients=clients)
    for number in (1, 2, 3):
        info = sim.train(number, STACKED).info
    assert info["own_weight"][0] == 1
    assert info["own_weight"].min() < 1, "or nobody is sent anything"


def server(affinity: list[float], heard: list[bool]) -> Server:
    size = len(heard)
    fresh = FedFomo().init_server({"w": torch.arange(2.0)}, Population(size, size))
    return fresh._replace(affinity=torch.tensor(affinity).expand(size, size), heard=torch.tensor(heard))


def test_the_models_of_the_largest_affinity_are_sent():
    method = FedFomo(models=2, epsilon=0.0)
    state = server([0.1, 0.9, 0.3, 0.0, 0.7], [True] * 5)
    down = method.dispatch(state, torch.tensor([0, 1]), torch_generator(0))
    assert down.models.owners.tolist() == [[1, 4], [4, 2]], "nobody is sent its own"
    assert down.itself.tolist() == [0, 1]
    few = state._replace(heard=torch.tensor([True, False, True, False, False]))
    ring = method.dispatch(few, torch.tensor([0]), torch_generator(0))
    assert ring.models.owners.tolist() == [[2, NOBODY]], "only of those who have taken part"


def test_with_probability_epsilon_they_are_drawn_at_random():
    """Two of four others are sent: with epsilon = 0.5, the best in half of the rounds and a sixth of the others."""
    method, state = FedFomo(models=2, epsilon=0.5), server([0.0, 9.0, 8.0, 7.0, 6.0], [True] * 5)
    draws, first = 2000, torch.tensor([0])
    owners = [method.dispatch(state, first, torch_generator(k)).models.owners[0] for k in range(draws)]
    sent = [set(each.tolist()) for each in owners]
    best = sum(each == {1, 2} for each in sent) / draws
    assert best == pytest.approx(0.5 + 0.5 / 6, abs=0.04)
    assert sum(4 in each for each in sent) / draws == pytest.approx(0.25, abs=0.04)


def test_the_chance_of_random_models_falls_with_each_round():
    method, state = FedFomo(models=2, epsilon=0.3, decay=0.1), server([0.0, 9.0, 8.0, 7.0, 6.0], [True] * 5)
    shares = []
    for number in range(4):
        now, rngs = state._replace(round=torch.tensor(number)), (torch_generator(k) for k in range(1500))
        down = (method.dispatch(now, torch.tensor([0]), rng).models.owners[0].tolist() for rng in rngs)
        shares.append(sum(set(owners) != {1, 2} for owners in down) / 1500)
    assert shares == pytest.approx([0.3 * 5 / 6, 0.2 * 5 / 6, 0.1 * 5 / 6, 0.0], abs=0.03)
    assert shares[-1] == 0.0
    sim = simulation(EVERYBODY, steps=1)
    for number in (1, 2):
        sim.train(number, STACKED)
    assert int(sim.state.server.round) == 2


def test_equal_affinities_are_in_random_order():
    method, state = FedFomo(models=1, epsilon=0.0), server([0.0] * 5, [True] * 5)
    sent = [int(method.dispatch(state, torch.tensor([0]), torch_generator(k)).models.owners[0, 0]) for k in range(400)]
    assert {sent.count(j) > 60 for j in (1, 2, 3, 4)} == {True}


def test_a_peer_holds_its_own_rows_and_offers_its_model():
    method, params = FedFomo(), {"w": torch.arange(DIM)}
    state = method.init_server(params, Population(4, 4, holds=torch.tensor([2])))
    assert state.affinity.shape == (1, 4)
    assert tree.nbytes(state.models) == tree.nbytes(params)
    assert torch.equal(method.offer(state, torch.tensor([2]))["w"][0], params["w"])
    assert state.at(torch.tensor([2, 0, 3])).tolist() == [0, -1, -1]
    # What it hears of others is that they took part.
    told = Own({"w": torch.full((2, DIM), 7)}, torch.full((2, 4), 5.0))
    after = method.aggregate(state, torch.tensor([0, 3]), Addressed(told, torch.full((2, 1), NOBODY), ()))
    assert torch.equal(after.models["w"], state.models["w"])
    assert not after.affinity.any()
    assert after.heard.tolist() == [True, False, False, True]


def test_affinities_below_0_are_refused():
    sim = testing.simulate(FedFomo(), rounds=1)
    down = sim.method.dispatch(sim.state.server, torch.tensor([0]), torch_generator(0))
    client, batches = tree.rows(sim.state.clients, 0), testing.batches(0, sim.method)
    up = sim.method.local_update(testing.task(), client, tree.rows(down, 0), batches)[1]
    assert sim.method.implausible(up, 5) is None
    lie = up._replace(own=up.own._replace(affinity=-up.own.affinity))
    assert sim.method.implausible(lie, 5) == "affinities below 0"
