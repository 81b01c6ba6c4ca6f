import pytest
import torch

from coterie.core.optimizers import SGD
from coterie.methods import APFL

from .quadratic import LOOP, STACKED, hessians, linear_terms, simulation, task


def test_one_step_by_hand():
    """One step from v = w = x0, then one from v != w: gradients of a quadratic are H w - b."""
    lr, alpha = 0.1, torch.tensor(0.3, dtype=torch.float64)
    sim = simulation(APFL(SGD(lr), float(alpha)), steps=1)
    x0 = task().init()["weight"].flatten()
    sim.train(1, LOOP)
    own, mean = [], 0
    for k, (h, b) in enumerate(zip(hessians(), linear_terms(), strict=True)):
        own.append(x0 - lr * alpha * (h @ x0 - b))  # alpha has no gradient while v = w
        torch.testing.assert_close(sim.state.clients.v["weight"][k].flatten(), own[k])
        assert float(sim.state.clients.alpha[k]) == pytest.approx(float(alpha))
        mean = mean + (15, 20, 30)[k] / 65 * (x0 - lr * (h @ x0 - b))
    torch.testing.assert_close(sim.state.server["weight"].flatten(), mean)
    sim.train(2, LOOP)
    for k, (h, b) in enumerate(zip(hessians(), linear_terms(), strict=True)):
        slope = h @ (alpha * own[k] + (1 - alpha) * mean) - b
        expected = float(alpha - lr * (own[k] - mean) @ slope)
        assert float(sim.state.clients.alpha[k]) == pytest.approx(expected, abs=1e-6)
        torch.testing.assert_close(sim.state.clients.v["weight"][k].flatten(), own[k] - lr * alpha * slope)


def test_alpha_stays_between_0_and_1():
    sim = simulation(APFL(SGD(0.2), 0.9), steps=50)
    for number in range(1, 6):
        sim.train(number, STACKED)
    assert ((sim.state.clients.alpha >= 0) & (sim.state.clients.alpha <= 1)).all()


def test_alpha_moves_with_the_first_minibatch_only():
    """In a second round of one or three steps, alpha is the same."""
    sims = [simulation(APFL(SGD(0.1), 0.3), steps) for steps in (1, 3)]
    sims[0].train(1, LOOP)
    sims[1].state = sims[0].state
    for sim in sims:
        sim.train(2, LOOP)
    assert torch.equal(*(sim.state.clients.alpha for sim in sims))
    assert not torch.equal(sims[0].state.clients.alpha, torch.full((3,), 0.3))


def test_alpha_is_clipped():
    """A large distance between v and w makes steps of alpha much longer than 1, to both sides."""
    sim = simulation(APFL(SGD(0.1), 0.5), steps=1)
    sim.train(1, LOOP)
    found = set()
    for away in (-50.0, 50.0):
        clients = sim.state.clients
        far = clients._replace(v={"weight": sim.state.server["weight"] + away * torch.ones_like(clients.v["weight"])})
        for alpha in (0.0, 1.0):
            again = simulation(APFL(SGD(0.1), 0.5), steps=1)
            again.state = sim.state._replace(clients=far._replace(alpha=torch.full_like(clients.alpha, alpha)))
            again.train(2, LOOP)
            found |= set(again.state.clients.alpha.tolist())
    assert 0.0 in found
    assert all(0 <= value <= 1 for value in found)
