import pytest
import torch

from coterie.core.optimizers import SGD
from coterie.methods import FedAvgFT, FedProx, FedProxFT

from .quadratic import DIM, LOOP, STACKED, hessians, linear_terms, simulation


@pytest.mark.parametrize("mu", [2.0, "auto"])
def test_the_global_model_is_fedproxs(mu):
    ours, theirs = simulation(FedProxFT(SGD(0.1), mu=mu), 5), simulation(FedProx(SGD(0.1), mu=mu), 5)
    for number in (1, 2):
        ours.train(number, LOOP)
        theirs.train(number, LOOP)
    assert torch.equal(ours.state.server["weight"], theirs.state.server["weight"])


def test_fine_tuning_has_no_pull():
    """Many epochs lead to argmin f_k = H^-1 b, whatever mu is."""
    sim = simulation(FedProxFT(SGD(0.2), mu=50.0, finetune_epochs=400), steps=1)
    sim.train(1, STACKED)
    views = sim.views(1, STACKED)["weight"]
    for k, (h, b) in enumerate(zip(hessians(), linear_terms(), strict=True)):
        torch.testing.assert_close(views[k].flatten(), torch.linalg.solve(h, b), rtol=1e-5, atol=1e-6)
    assert views.shape == (3, 1, DIM)


def test_without_pull_it_is_fedavg_with_fine_tuning():
    ours, theirs = simulation(FedProxFT(SGD(0.1), mu=0.0), 3), simulation(FedAvgFT(SGD(0.1)), 3)
    for number in (1, 2):
        ours.train(number, LOOP)
        theirs.train(number, LOOP)
    assert torch.equal(ours.views(2, LOOP)["weight"], theirs.views(2, LOOP)["weight"])
