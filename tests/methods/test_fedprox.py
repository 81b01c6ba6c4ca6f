import pytest
import torch

from coterie.core.optimizers import SGD, Adam
from coterie.methods import FedProx

from .quadratic import DIM, LOOP, SHARE, STACKED, hessians, linear_terms, simulation

EYE = torch.eye(DIM, dtype=torch.float64)


@pytest.mark.parametrize("mu", [0.1, 1.0, 5.0])
def test_exact_minimiser(mu):
    """argmin f_k + (mu/2)||w - w_g||^2 = (H_k + mu I)^-1 (b_k + mu w_g), averaged by n_k."""
    sim = simulation(FedProx(SGD(0.1), mu=mu), steps=300)
    w = sim.state.server["weight"].flatten()
    sim.train(1, STACKED)
    solved = [torch.linalg.solve(h + mu * EYE, b + mu * w) for h, b in zip(hessians(), linear_terms(), strict=True)]
    expected = sum(s * each for s, each in zip(SHARE, solved, strict=True))
    torch.testing.assert_close(sim.state.server["weight"].flatten(), expected, rtol=1e-5, atol=1e-6)


def test_the_automatic_pull_takes_back_a_tenth_of_the_way():
    """mu = 0.1 / (lr K), whatever lr and the number of steps K are."""
    for lr, steps in ((0.1, 5), (0.02, 40)):
        auto, number = (simulation(FedProx(SGD(lr), **mu), steps) for mu in ({}, {"mu": 0.1 / (lr * steps)}))
        auto.train(1, LOOP)
        number.train(1, LOOP)
        torch.testing.assert_close(auto.state.server["weight"], number.state.server["weight"])


def test_the_automatic_pull_counts_the_weights_that_adam_moves():
    """Adam moves each of the d = 4 trained weights by about lr: mu = 0.1 / (lr sqrt(d) K)."""
    lr, steps = 0.05, 10
    auto, number = (simulation(FedProx(Adam(lr), **mu), steps) for mu in ({}, {"mu": 0.1 / (lr * DIM**0.5 * steps)}))
    auto.train(1, LOOP)
    number.train(1, LOOP)
    torch.testing.assert_close(auto.state.server["weight"], number.state.server["weight"])
