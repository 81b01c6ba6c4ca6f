import torch

from coterie.core.optimizers import SGD
from coterie.experiment.simulation import Simulation
from coterie.methods import Ditto

from .quadratic import DIM, LOOP, SIZES, STACKED, federation, hessians, linear_terms, simulation, task

EYE = torch.eye(DIM, dtype=torch.float64)


def test_personal_minimiser():
    """v_k = argmin f_k + (lambda/2)||v - w||^2 with the w received, not the one trained in the same round."""
    lam = 1.5
    sim = simulation(Ditto(SGD(0.15), lam=lam), steps=200)
    sim.train(1, STACKED)
    w = sim.state.server["weight"].flatten()
    sim.train(2, STACKED)
    for k, (h, b) in enumerate(zip(hessians(), linear_terms(), strict=True)):
        expected = torch.linalg.solve(h + lam * EYE, b + lam * w)
        torch.testing.assert_close(sim.state.clients.v["weight"][k].flatten(), expected, rtol=1e-6, atol=1e-7)


def test_a_client_that_never_took_part_deploys_w():
    method = Ditto(SGD(0.1))
    sim = Simulation.start(method, task(), federation(), simulation(method, 2).plan, participants=1, seed=0)
    sim.train(1, LOOP)
    (first,) = sim.sample(1)
    views = sim.views(1, LOOP)["weight"]
    for k in range(len(SIZES)):
        own = sim.state.clients.v["weight"][k] if k == first else sim.state.server["weight"]
        assert torch.equal(views[k], own)
