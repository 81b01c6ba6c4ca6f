import pytest
import torch

from coterie.core.optimizers import SGD, Adam
from coterie.methods import FedProx, FedProxFT

from .quadratic import DIM, STACKED, hessians, linear_terms, simulation


def test_fine_tuning_has_no_pull():
    """Many epochs lead to argmin f_k = H^-1 b, whatever mu is."""
    sim = simulation(FedProxFT(SGD(0.2), mu=50.0, finetune_epochs=400), steps=1)
    sim.train(1, STACKED)
    views = sim.views(1, STACKED)["weight"]
    for k, (h, b) in enumerate(zip(hessians(), linear_terms(), strict=True)):
        torch.testing.assert_close(views[k].flatten(), torch.linalg.solve(h, b), rtol=1e-5, atol=1e-6)
    assert views.shape == (3, 1, DIM)


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adam(0.05)])
def test_a_round_is_fedproxs(optimizer):
    ours, theirs = (simulation(method(optimizer), steps=5) for method in (FedProxFT, FedProx))
    for number in (1, 2):
        ours.train(number, STACKED)
        theirs.train(number, STACKED)
    assert torch.equal(ours.state.server["weight"], theirs.state.server["weight"])
