import pytest
import torch

from coterie.experiment.simulation import Simulation
from coterie.local import SGD
from coterie.method import Population
from coterie.methods import FedMAP
from coterie.methods.fedmap import Up

from .quadratic import DIM, LOOP, SHARE, SIZES, STACKED, federation, hessians, linear_terms, loss, simulation, task

EYE = torch.eye(DIM, dtype=torch.float64)
SIGMA2 = 0.7


def solve(method: FedMAP) -> tuple[Simulation, torch.Tensor]:
    """(after one round of exact local minimisation, gamma before it)."""
    sim = simulation(method, steps=300)
    gamma = sim.state.server.gamma["weight"].flatten()
    sim.train(1, STACKED)
    return sim, gamma


def scales(likelihood: str) -> list[float]:
    return [float(size) if likelihood == "sum" else 1.0 for size in SIZES]


def minimisers(gamma: torch.Tensor, likelihood: str) -> list[torch.Tensor]:
    """theta_k = argmin s_k f_k(theta) + ||theta - gamma||^2 / (2 sigma^2), s_k = N_k for eq. 2 and 1 for eq. 7."""
    return [
        torch.linalg.solve(s * h + EYE / SIGMA2, s * b + gamma / SIGMA2)
        for s, h, b in zip(scales(likelihood), hessians(), linear_terms(), strict=True)
    ]


@pytest.mark.parametrize("likelihood", ["mean", "sum"])
def test_local_minimiser_eq_7(likelihood):
    sim, gamma = solve(FedMAP(SGD(0.15), sigma2=SIGMA2, likelihood=likelihood))
    for k, expected in enumerate(minimisers(gamma, likelihood)):
        torch.testing.assert_close(sim.state.clients.theta["weight"][k].flatten(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("likelihood", ["mean", "sum"])
def test_weights_eq_8_and_mean_eq_9(likelihood):
    sim, gamma = solve(FedMAP(SGD(0.15), sigma2=SIGMA2, likelihood=likelihood))
    thetas = minimisers(gamma, likelihood)
    log_omega = torch.stack(
        [
            -scale * loss(k, theta) - ((theta - gamma) ** 2).sum() / (2 * SIGMA2)
            for k, (scale, theta) in enumerate(zip(scales(likelihood), thetas, strict=True))
        ]
    )
    weight = torch.softmax(log_omega, 0)
    torch.testing.assert_close(sim.state.server.weight.double(), weight, rtol=1e-4, atol=1e-6)
    expected = sum(w * t for w, t in zip(weight, thetas, strict=True))
    torch.testing.assert_close(sim.state.server.gamma["weight"].flatten(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("likelihood", ["mean", "sum"])
def test_aggregation_is_a_gradient_step_on_the_envelope_theorem_1(weighting, likelihood):
    """gamma' = gamma - lambda grad M(gamma) with lambda = sigma^2, M(gamma) = sum_k w_k min_theta {L_k + R}."""
    sim, gamma = solve(FedMAP(SGD(0.15), sigma2=SIGMA2, weighting=weighting, likelihood=likelihood))
    weights = SHARE if weighting == "samples" else torch.full_like(SHARE, 1 / len(SIZES))

    def envelope(gamma: torch.Tensor) -> torch.Tensor:
        # The minimiser depends on gamma; autograd goes through that dependence too, and it must not matter.
        return sum(
            w * (s * loss(k, t) + ((t - gamma) ** 2).sum() / (2 * SIGMA2))
            for k, (w, s, t) in enumerate(zip(weights, scales(likelihood), minimisers(gamma, likelihood), strict=True))
        )

    gradient = torch.func.grad(envelope)(gamma)
    torch.testing.assert_close(
        sim.state.server.gamma["weight"].flatten(), gamma - SIGMA2 * gradient, rtol=1e-4, atol=1e-6
    )


def test_log_weights_far_below_the_smallest_float_still_weigh():
    """The paper's omega underflows to 0 for all clients (exp(-900)); their ratio is what matters."""
    method = FedMAP()
    params = {"w": torch.zeros(2)}
    server = method.init_server(params, Population(3, 2))
    ups = Up(
        {"w": torch.tensor([[1.0, 1.0], [3.0, 3.0]])}, torch.tensor([-900.0, -900.0 + torch.log(torch.tensor(3.0))])
    )
    server = method.aggregate(server, torch.tensor([0, 2]), ups)
    torch.testing.assert_close(server.gamma["w"], torch.tensor([2.5, 2.5]))
    torch.testing.assert_close(server.weight, torch.tensor([0.25, 0.0, 0.75]))


def test_a_client_starts_from_the_prior_and_then_from_its_own_model():
    """First round from gamma, later from its own theta_k; one that was never sampled deploys gamma."""
    method = FedMAP(SGD(0.15))
    sim = Simulation.start(method, task(), federation(), simulation(method, 1).plan, participants=1, seed=0)
    sim.train(1, STACKED)
    (first,) = sim.sample(1)
    views = sim.views(1, LOOP)["weight"]
    for k in range(len(SIZES)):
        own = sim.state.clients.theta["weight"][k] if k == first else sim.state.server.gamma["weight"]
        assert torch.equal(views[k], own)
    assert sim.state.clients.rounds.tolist() == [int(k == first) for k in range(len(SIZES))]


def test_a_wide_prior_is_local_training_and_a_narrow_one_stays_at_gamma():
    alone = [torch.linalg.solve(h, b) for h, b in zip(hessians(), linear_terms(), strict=True)]
    sim, _ = solve(FedMAP(SGD(0.15), sigma2=1e9))
    for k, expected in enumerate(alone):
        torch.testing.assert_close(sim.state.clients.theta["weight"][k].flatten(), expected, rtol=1e-4, atol=1e-5)
    sim = simulation(FedMAP(SGD(1e-4), sigma2=1e-3), steps=500)
    gamma = sim.state.server.gamma["weight"]
    sim.train(1, STACKED)
    assert (sim.state.clients.theta["weight"] - gamma).abs().max() < 0.01
