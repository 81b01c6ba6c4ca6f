"""The numbers of a probe against closed forms."""

import pytest
import torch
from torch import nn

import coterie
from coterie.engine import Engine
from coterie.experiment.probe import make_probe, progress_of, pull_of, spread
from coterie.experiment.setup import prepare
from tests.experiment.conftest import QUICK, two_kinds

LR = 1e-3
SETTINGS = {"model": "linear", "lr": LR, "local_steps": 2, "batch_size": 1000, "rounds": 3}  # full batches


def probe(method="fedprox", steps=200, **settings):
    setup = prepare(method, two_kinds(3), **(QUICK | SETTINGS | settings))
    sim = make_probe(setup, 3, steps)
    sim.train(1, Engine("loop"))
    return sim


def test_two_steps_of_fedprox():
    """p_0 = 0 and p_1 = mu (theta_1 - w) = -mu lr d_0. With d_1 nearly d_0, the strength is mu lr / 2."""
    mu = 100.0
    pull = pull_of(probe(mu=mu), 2, [0, 1, 2])
    assert pull.strength == pytest.approx(mu * LR / 2, rel=0.01)
    assert pull.movement == pytest.approx(1 - mu * LR / 2, rel=0.01)
    assert pull.reach == pull.strength


def test_a_round_that_is_cut_short_reaches_further():
    """Of eight steps, two are taken: the strength may be four times as large at the end."""
    pull = pull_of(probe(steps=2, mu=100.0, local_steps=8), 2, [0, 1, 2])
    assert pull.reach == pytest.approx(4 * pull.strength)


@pytest.mark.parametrize("method", ["fedavg", "fedper", "local"])
def test_methods_without_terms_have_a_strength_of_exactly_0(method):
    assert pull_of(probe(method, model="mlp"), 2, [0, 1])[:2] == (0.0, 1.0)


def test_ditto_is_measured_where_it_pulls():
    """Its training of the global model has no term; v's has, as FedProx's would."""
    ditto = pull_of(probe("ditto", lam=100.0), 2, [0])
    assert ditto.strength > 10 * LR


def test_steps_inside_a_vmap_are_not_seen():
    assert pull_of(probe("federico", model="mlp"), 2, [0]) is None


def test_a_method_without_an_optimiser_is_not_watched():
    sim = probe()
    sim.method = coterie.METHODS["fedprox"](optimizer=None)
    assert pull_of(sim, 2, [0]) is None


def test_training_alone_makes_all_of_its_own_progress():
    sim = probe("local")
    engine = Engine("loop")
    before = sim.views(1, engine)
    sim.train(2, engine)
    assert progress_of(sim, before, sim.views(2, engine), 2, [0, 1, 2]) == pytest.approx(1, rel=1e-5)


def test_a_probe_changes_nothing_of_the_simulation():
    sim = probe("fedamp")
    before = [leaf.clone() for leaf in sim.state.clients.values()]
    state = torch.get_rng_state()
    pull_of(sim, 2, [0])
    assert all(torch.equal(a, b) for a, b in zip(before, sim.state.clients.values(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_dropout_is_the_same_in_both_gradients():
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 2))
    setup = prepare("fedavg", two_kinds(3), **(QUICK | {"model": model}))
    sim = make_probe(setup, 3, 5)
    assert pull_of(sim, 1, [0]).strength == 0


def test_clients_are_chosen_from_the_largest_to_the_smallest():
    data = {f"site-{i}": (torch.randn(20 + 10 * i, 4), torch.arange(20 + 10 * i) % 2) for i in range(9)}
    federation = coterie.from_clients(data)
    assert spread(federation, 3) == [0, 4, 8]
    assert spread(federation, 1) == [4]
    assert spread(federation, 20) == list(range(9))
