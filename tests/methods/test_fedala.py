import pytest
import torch

from coterie import testing
from coterie.core import tree
from coterie.core.optimizers import SGD
from coterie.core.training import train
from coterie.methods import FedALA
from coterie.methods.fedala import _last_layers, _share

from .quadratic import LOOP, hessians, linear_terms, simulation, task


@pytest.mark.parametrize("passes", [1, 3])
def test_weights_by_hand(passes):
    """One minibatch an epoch: grad f(theta_hat) = H theta_hat - b, and W goes down along grad * (w - theta)."""
    lr, eta = 0.1, 0.7
    sim = simulation(FedALA(SGD(lr), eta=eta, sample=1.0, first_passes=passes), steps=1)
    sim.train(1, LOOP)
    own, w = sim.state.clients.theta["weight"].squeeze(1), sim.state.server["weight"].flatten()
    x0 = task().init()["weight"].flatten()
    assert (sim.state.clients.weight["weight"] == 1).all()  # in its first round a client takes w as it is
    torch.testing.assert_close(own[0], x0 - lr * (hessians()[0] @ x0 - linear_terms()[0]))
    sim.train(2, LOOP)
    for k, (h, b) in enumerate(zip(hessians(), linear_terms(), strict=True)):
        weight = torch.ones(4, dtype=torch.float64)
        for _ in range(passes):
            mixed = own[k] + (w - own[k]) * weight
            weight = (weight - eta * (h @ mixed - b) * (w - own[k])).clamp(0, 1)
        mixed = own[k] + (w - own[k]) * weight
        torch.testing.assert_close(sim.state.clients.weight["weight"][k].flatten(), weight)
        torch.testing.assert_close(sim.state.clients.theta["weight"][k].flatten(), mixed - lr * (h @ mixed - b))
    assert ((sim.state.clients.weight["weight"] > 0) & (sim.state.clients.weight["weight"] < 1)).any()


def test_from_the_third_round_on_weights_take_one_pass():
    sims = [simulation(FedALA(SGD(0.1), eta=0.1, sample=1.0, first_passes=passes), steps=1) for passes in (1, 4)]
    for sim in sims:
        for number in (1, 2):
            sim.train(number, LOOP)
    sims[1].state = sims[0].state
    for sim in sims:
        sim.train(3, LOOP)
    assert torch.equal(*(sim.state.clients.weight["weight"] for sim in sims))


def test_a_client_that_begins_late_takes_w_as_it_is_and_adapts_nothing_before_it_has_a_model_of_its_own():
    """The shared model is far from the initial one by then, so steps on W would move it."""
    method, model = FedALA(SGD(0.1), eta=10.0, sample=1.0), testing.task()
    w = tree.map(lambda leaf: leaf + 0.3, model.init())
    client, _, _ = method.local_update(model, method.init_client(model.init()), w, testing.batches(1))
    assert all(bool((weight == 1).all()) for weight in client.weight.values())
    expected, _ = train(model, SGD(0.1), w, testing.batches(1))
    testing.same(client.theta, expected, "the first round is training from w", tolerance=1e-6)
    client, _, _ = method.local_update(model, client, w, testing.batches(1))
    assert any(bool((weight < 1).any()) for weight in client.weight.values())


def test_which_layers_are_mixed():
    named, params = testing.task(), testing.task().init()
    assert _last_layers(named, params, 0) == []
    assert set(_last_layers(named, params, 1)) == {"4.weight", "4.bias"}
    assert set(_last_layers(named, params, 2)) == {"0.weight", "4.weight", "4.bias"}
    assert set(_last_layers(named, params, 9)) == {"0.weight", "4.weight", "4.bias"}


def test_a_share_of_the_minibatches():
    batches = testing.batches(0).epoch(0)
    real = int(batches.mask.flatten(0, 1).any(-1).sum())
    for share, kept in ((1.0, real), (0.5, -(-real // 2)), (0.01, 1)):
        some = _share(batches, share)
        assert int(some.mask.flatten(0, 1).any(-1).sum()) == kept
