import pytest
import torch

from coterie import testing
from coterie.core.optimizers import SGD
from coterie.methods import FedAvg, FedPAFT

from .quadratic import DIM, LOOP, SHARE, hessians, linear_terms, simulation, task


def test_in_the_burn_in_it_is_fedavg():
    ours, theirs = testing.simulate(FedPAFT(SGD(0.1), samples=5, burn_in=2)), testing.simulate(FedAvg(SGD(0.1)))
    for name, value in theirs.state.server.items():
        torch.testing.assert_close(ours.state.server.w[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settle", [0.0, 0.5])
@pytest.mark.parametrize("samples", [1, 2, 4])
def test_a_round_by_the_dense_inverse(samples, settle):
    """Eight steps of exact gradient descent; those after `settle` are cut into l parts, and averaged into samples."""
    lr, rho = 0.1, 0.4
    sim = simulation(FedPAFT(SGD(lr), samples=samples, rho=rho, burn_in=0, settle=settle, server_lr=0.5), steps=8)
    x0 = task().init()["weight"].flatten()
    sim.train(1, LOOP)
    expected = x0.clone()
    for share, h, b in zip(SHARE, hessians(), linear_terms(), strict=True):
        iterates, x = [], x0
        for _ in range(8):
            x = x - lr * (h @ x - b)
            iterates.append(x)
        points = torch.stack(iterates[int(8 * settle) :]).reshape(samples, -1, DIM).mean(1)
        shrink = 1 / (1 + (samples - 1) * rho)
        centred = points - points.mean(0)
        covariance = centred.T @ centred / max(samples - 1, 1)
        sigma = shrink * torch.eye(DIM, dtype=torch.float64) + (1 - shrink) * covariance
        expected -= 0.5 * share * torch.linalg.solve(sigma, x0 - points.mean(0))
    torch.testing.assert_close(sim.state.server.w["weight"].flatten(), expected)


def test_fewer_steps_than_samples():
    """Three steps, five samples asked for: each step is a sample of its own, and the two others do not count."""
    few, three = (simulation(FedPAFT(SGD(0.1), samples=s, rho=0.4, burn_in=0, settle=0.0), 3) for s in (5, 3))
    few.train(1, LOOP)
    three.train(1, LOOP)
    torch.testing.assert_close(few.state.server.w["weight"], three.state.server.w["weight"])


def test_a_single_step_is_never_discarded():
    one, whole = (simulation(FedPAFT(SGD(0.1), burn_in=0, settle=s), steps=1) for s in (0.9, 0.0))
    one.train(1, LOOP)
    whole.train(1, LOOP)
    assert torch.equal(one.state.server.w["weight"], whole.state.server.w["weight"])


def test_the_burn_in_is_half_of_the_rounds():
    assert FedPAFT().scheduled(7).burn_in == 3
    assert FedPAFT(burn_in=5).scheduled(7).burn_in == 5
