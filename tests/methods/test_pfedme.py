import pytest
import torch

from coterie.core.method import TrainedAndBuffers
from coterie.core.optimizers import SGD
from coterie.experiment.simulation import Simulation
from coterie.methods import PFedMe

from .quadratic import DIM, LOOP, SHARE, SIZES, STACKED, federation, hessians, linear_terms, loss, simulation, task

EYE = torch.eye(DIM, dtype=torch.float64)
LAM, ETA, A = 2.0, 0.3, 0.15
EXACT = PFedMe(SGD(A), lam=LAM, outer_lr=ETA, prox_steps=80)


def flat(params):
    return params["weight"].flatten()


def prox(w):
    """argmin f_k + (lambda/2)||theta - w||^2 = (H_k + lambda I)^-1 (b_k + lambda w)."""
    return [torch.linalg.solve(h + LAM * EYE, b + LAM * w) for h, b in zip(hessians(), linear_terms(), strict=True)]


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_exact_proximal_point_and_server_step(beta):
    sim = simulation(PFedMe(SGD(A), lam=LAM, outer_lr=ETA, prox_steps=80, beta=beta), steps=1)
    w = flat(sim.state.server)
    sim.train(1, STACKED)
    thetas = prox(w)
    for k, theta in enumerate(thetas):
        torch.testing.assert_close(sim.state.clients.theta["weight"][k].flatten(), theta, rtol=1e-6, atol=1e-7)
    mean = sum(s * (w - ETA * LAM * (w - theta)) for s, theta in zip(SHARE, thetas, strict=True))
    torch.testing.assert_close(flat(sim.state.server), (1 - beta) * w + beta * mean, rtol=1e-6, atol=1e-7)


def test_the_step_of_w_is_a_gradient_step_on_the_moreau_envelope():
    sim = simulation(EXACT, steps=1)
    w = flat(sim.state.server)
    sim.train(1, STACKED)

    def envelope(w):  # autograd goes through the minimiser too, and it must not matter
        return sum(
            s * (loss(k, t) + LAM / 2 * ((t - w) ** 2).sum())
            for k, (s, t) in enumerate(zip(SHARE, prox(w), strict=True))
        )

    expected = w - ETA * torch.func.grad(envelope)(w)
    torch.testing.assert_close(flat(sim.state.server), expected, rtol=1e-6, atol=1e-7)


def test_fixed_point():
    """sum_k p_k lambda (w - theta_k(w)) = 0, so sum_k p_k (H_k + lambda)^-1 (H_k w - b_k) = 0."""
    sim = simulation(PFedMe(SGD(A), lam=LAM, outer_lr=1.0, prox_steps=40), steps=1)
    for number in range(1, 41):
        sim.train(number, STACKED)
    inverse = [torch.linalg.inv(h + LAM * EYE) for h in hessians()]
    left = sum(s * i @ h for s, i, h in zip(SHARE, inverse, hessians(), strict=True))
    right = sum(s * i @ b for s, i, b in zip(SHARE, inverse, linear_terms(), strict=True))
    torch.testing.assert_close(flat(sim.state.server), torch.linalg.solve(left, right), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("start", ["w", "theta-in-round", "theta"])
def test_few_steps_begin_where_they_should(start):
    """K steps from p: theta* + (I - a (H + lambda I))^K (p - theta*), for 2 rounds of 2 minibatches."""
    steps, uniform = 3, torch.full((3,), 1 / 3, dtype=torch.float64)
    method = PFedMe(SGD(A), lam=LAM, outer_lr=ETA, prox_steps=steps, start=start, weighting="uniform")
    sim = simulation(method, steps=2)
    w, thetas = flat(sim.state.server), [flat(sim.state.server)] * 3
    for number in (1, 2):
        sim.train(number, STACKED)
        owns = []
        for k, (h, b) in enumerate(zip(hessians(), linear_terms(), strict=True)):
            own, theta = w, thetas[k] if start == "theta" else w
            shrink = torch.linalg.matrix_power(EYE - A * (h + LAM * EYE), steps)
            for _ in range(2):
                star = torch.linalg.solve(h + LAM * EYE, b + LAM * own)
                theta = star + shrink @ ((own if start == "w" else theta) - star)
                own = own - ETA * LAM * (own - theta)
            thetas[k] = theta
            owns.append(own)
        w = sum(u * own for u, own in zip(uniform, owns, strict=True))
    torch.testing.assert_close(flat(sim.state.server), w, rtol=1e-6, atol=1e-7)
    for k, theta in enumerate(thetas):
        torch.testing.assert_close(sim.state.clients.theta["weight"][k].flatten(), theta, rtol=1e-6, atol=1e-7)


def test_personal_and_global_models():
    """A client deploys its theta, w if it never took part; w is scored beside it."""
    plan = simulation(EXACT, 1).plan
    sim = Simulation.start(EXACT, task(), federation(), plan, participants=1, seed=0)
    sim.train(1, LOOP)
    (first,) = sim.sample(1)
    views = sim.views(1, LOOP)["weight"]
    for k in range(len(SIZES)):
        own = sim.state.clients.theta["weight"][k] if k == first else sim.state.server["weight"]
        assert torch.equal(views[k], own)
    scores = sim.evaluate(1, LOOP)
    same = torch.as_tensor(scores["test"]["rmse"]) == torch.as_tensor(scores["global_test"]["rmse"])
    assert same.tolist() == [k != first for k in range(len(SIZES))]


def test_the_server_extrapolates_parameters_and_never_buffers():
    ups = TrainedAndBuffers(
        {"w": torch.tensor([[3.0], [5.0]])}, {"var": torch.tensor([[0.1], [0.3]])}, torch.tensor([1.0, 1.0])
    )
    new = PFedMe(beta=2.0).aggregate({"w": torch.tensor([1.0]), "var": torch.tensor([1.0])}, torch.arange(2), ups)
    torch.testing.assert_close(new, {"w": torch.tensor([7.0]), "var": torch.tensor([0.2])})


def test_by_default_the_step_of_w_is_that_of_a_plain_step_of_descent():
    """To first order: with lambda (theta - w) from K exact steps, eta = a / (1 - (1 - a lambda)^K)."""
    steps = 3
    sim = simulation(PFedMe(SGD(A), lam=LAM, prox_steps=steps), steps=1)
    w = flat(sim.state.server)
    sim.train(1, STACKED)
    eta, moved = A / (1 - (1 - A * LAM) ** steps), []
    for hessian, linear in zip(hessians(), linear_terms(), strict=True):
        theta = w
        for _ in range(steps):
            theta = theta - A * (hessian @ theta - linear + LAM * (theta - w))
        moved.append(w - eta * LAM * (w - theta))
    expected = sum(s * each for s, each in zip(SHARE, moved, strict=True))
    torch.testing.assert_close(flat(sim.state.server), expected, rtol=1e-9, atol=1e-12)
