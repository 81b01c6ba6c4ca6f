import dataclasses

import pytest
import torch

from coterie import testing
from coterie.core import tree
from coterie.core.optimizers import SGD, Adam
from coterie.core.training import envelope_step
from coterie.data.minibatches import Plan
from coterie.experiment.simulation import Simulation
from coterie.methods import PFedBreD, PFedMe
from coterie.parts.bregman import LogCosh, Quadratic

from .quadratic import DIM, LOOP, SHARE, SIZES, STACKED, federation, hessians, linear_terms, loss, simulation, task

EYE = torch.eye(DIM, dtype=torch.float64)
LAM, A, OUTER, ETA, ETA_ALPHA, K = 2.0, 0.12, 0.2, 0.3, 0.1, 3
METHOD = PFedBreD(SGD(A), lam=LAM, outer_lr=OUTER, eta=ETA, eta_alpha=ETA_ALPHA, prox_steps=K)
UNIFORM = torch.full((len(SIZES),), 1 / len(SIZES), dtype=torch.float64)


@pytest.mark.parametrize("generator", ["squared-norm", "diagonal", "log-cosh"])
def test_only_the_squared_norm_without_a_strategy_is_pfedme(generator):
    """Bit for bit, on a network with BatchNorm and dropout, with some of the clients and AM."""
    same = {"lam": 3.0, "outer_lr": 0.1, "beta": 2.0, "prox_steps": 2}
    for variant, other in (
        ("authors", PFedMe(SGD(0.05), **same)),
        ("paper", PFedMe(SGD(0.05), **same, start="theta", weighting="uniform")),
    ):
        method = PFedBreD(SGD(0.05), **same, strategy="none", variant=variant, generator=generator)
        sims = [
            Simulation.start(m, testing.task(), testing.federation(), Plan(6, 1), 3, seed=0) for m in (method, other)
        ]
        for number in (1, 2, 3):
            for sim in sims:
                sim.train(number, LOOP)
        ours, theirs = ({**sim.state.server, **tree.pack(sim.views(3, LOOP))} for sim in sims)
        equal = all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert equal == (generator == "squared-norm")


@pytest.mark.parametrize("strategy", ["none", "lg", "meg", "mh"])
@pytest.mark.parametrize("variant", ["authors", "paper"])
@pytest.mark.parametrize("order", ["identity", "exact"])
def test_two_rounds_by_hand(strategy, variant, order):
    """The published code, and eqs 13 and 14, of first and second order; grad f = H w - b, two iterations a round."""
    sim = simulation(dataclasses.replace(METHOD, strategy=strategy, variant=variant, jacobian=order), steps=2)
    w = sim.state.server["weight"].flatten()
    kept = [(w, w)] * len(SIZES)  # theta, m
    for number in (1, 2):
        sim.train(number, STACKED)
        owns = []
        for k, (h, b) in enumerate(zip(hessians(), linear_terms(), strict=True)):
            own, (theta, memory) = w, kept[k]
            for _ in range(2):
                jacobian = EYE
                if strategy == "mh" and variant == "authors":
                    own = own - ETA_ALPHA * (h @ (own - ETA_ALPHA * (h @ own - b)) - b)
                mu = own
                if strategy == "lg" or (strategy == "mh" and variant == "paper"):
                    mu, jacobian = mu - ETA_ALPHA * (h @ own - b), EYE - ETA_ALPHA * h if order == "exact" else EYE
                if strategy in ("meg", "mh"):
                    mu = mu - ETA * (memory - theta)
                if variant == "authors":
                    theta = mu if strategy == "lg" else own
                for _ in range(K):
                    theta = theta - A * (h @ theta - b + LAM * (theta - mu))
                own = own - OUTER * LAM * jacobian @ (mu - theta)
            kept[k] = (theta, own)
            owns.append(own)
        share = SHARE if variant == "authors" else UNIFORM
        w = sum(s * own for s, own in zip(share, owns, strict=True))
    torch.testing.assert_close(sim.state.server["weight"].flatten(), w, rtol=1e-6, atol=1e-7)
    for k, (theta, memory) in enumerate(kept):
        torch.testing.assert_close(sim.state.clients.theta["weight"][k].flatten(), theta, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(sim.state.clients.memory["weight"][k].flatten(), memory, rtol=1e-6, atol=1e-7)


def test_the_authors_mh_takes_two_minibatches_an_iteration():
    """B1 = minibatch 0 and B2 = 1, then 1 and 0; the proximal steps are on B2."""
    data, plan = federation(), Plan(batch_size=8, epochs=1)  # the first client has minibatches of 8 and 7
    sim = Simulation.start(METHOD, task(), data, plan, 3, seed=0)
    batches = tree.rows(sim._draw([0], plan, "minibatches", 1)._replace(x=data.x[None], y=data.y[None]), 0)
    client, _, _ = METHOD.local_update(sim.task, tree.rows(sim.state.clients, 0), sim.state.server, batches)

    def gradient(w, step):
        rows = batches.index[0, step][batches.mask[0, step] > 0]
        return 2 * data.x[rows].T @ (data.x[rows] @ w - data.y[rows]) / len(rows)

    own = theta = memory = sim.state.server["weight"].flatten()
    for first, second in ((0, 1), (1, 0)):
        own = own - ETA_ALPHA * gradient(own - ETA_ALPHA * gradient(own, first), second)
        mu, theta = own - ETA * (memory - theta), own
        for _ in range(K):
            theta = theta - A * (gradient(theta, second) + LAM * (theta - mu))
        own = own - OUTER * LAM * (mu - theta)
    torch.testing.assert_close(client.theta["weight"].flatten(), theta, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(client.memory["weight"].flatten(), own, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("generator", "phi"),
    [("squared-norm", Quadratic()), ("diagonal", Quadratic((("w", 0.4),))), ("log-cosh", LogCosh(0.7))],
)
@pytest.mark.parametrize("strategy", ["none", "lg", "mh"])
def test_the_step_of_w_is_the_gradient_of_the_envelope_eqs_2_and_13(generator, phi, strategy):
    """F(w) = min_theta f(theta) + lambda D(theta, mu(w)), by central differences; theta is its minimiser."""
    method = dataclasses.replace(
        METHOD,
        strategy=strategy,
        variant="paper",
        jacobian="exact",
        generator=generator,
        prox_steps=150,
        head_weight=0.4,
        width=0.7,
    )
    sim = simulation(method, steps=1)
    w = sim.state.server["weight"].flatten()
    sim.train(1, STACKED)
    h, b = hessians()[0], linear_terms()[0]

    def mean(w):
        return w if strategy == "none" else w - ETA_ALPHA * (h @ w - b)  # the memory is empty in the first round

    def prox(mu):  # Newton's method, halving steps that do not descend
        def objective(theta):
            return loss(0, theta) + LAM * phi.divergence({"w": theta}, {"w": mu})

        theta = mu
        for _ in range(30):
            slope = h @ theta - b + LAM * (phi.gradient("w", theta) - phi.gradient("w", mu))
            step = torch.linalg.solve(h + LAM * torch.diag(phi.curvature("w", theta)), slope)
            while objective(theta - step) > objective(theta) + 1e-14:
                step = step / 2
            theta = theta - step
        return theta, objective(theta)

    torch.testing.assert_close(sim.state.clients.theta["weight"][0].flatten(), prox(mean(w))[0], rtol=1e-5, atol=1e-6)
    slope = [(prox(mean(w + e))[1] - prox(mean(w - e))[1]) / 2e-5 for e in 1e-5 * EYE]
    moved = (w - sim.state.clients.memory["weight"][0].flatten()) / OUTER
    torch.testing.assert_close(moved, torch.stack(slope), rtol=1e-4, atol=1e-5)


def test_automatic_steps_follow_the_optimiser():
    """eta_alpha is SGD's lr; alpha_m moves w by one plain step to first order."""
    automatic = PFedBreD(SGD(A), strategy="none", lam=LAM, prox_steps=K)
    assert (automatic._loss_step, PFedBreD(Adam(1e-4))._loss_step) == (A, 0.01)
    assert automatic._outer_step == envelope_step(SGD(A), LAM, K) == PFedBreD(SGD(A), lam=LAM, prox_steps=K)._outer_step
    given = dataclasses.replace(automatic, outer_lr=A / (1 - (1 - A * LAM) ** K))
    ours, theirs = (simulation(method, steps=2) for method in (automatic, given))
    for sim in (ours, theirs):
        sim.train(1, LOOP)
    torch.testing.assert_close(ours.state.server, theirs.state.server)


def test_finetune_takes_so_many_plain_steps_from_theta():
    sim = simulation(dataclasses.replace(METHOD, finetune=2), steps=1)
    sim.train(1, STACKED)
    views = sim.views(1, LOOP)["weight"]
    for k, (h, b) in enumerate(zip(hessians(), linear_terms(), strict=True)):
        theta = sim.state.clients.theta["weight"][k].flatten()
        for _ in range(2):
            theta = theta - A * (h @ theta - b)
        torch.testing.assert_close(views[k].flatten(), theta, rtol=1e-6, atol=1e-7)


def test_personal_and_global_models():
    """P is theta, w for a client that never took part; G is w, and both are scored."""
    sim = Simulation.start(METHOD, task(), federation(), simulation(METHOD, 1).plan, participants=1, seed=0)
    sim.train(1, LOOP)
    (first,) = sim.sample(1)
    scores = sim.evaluate(1, LOOP)
    same = torch.as_tensor(scores["test"]["rmse"]) == torch.as_tensor(scores["global_test"]["rmse"])
    assert same.tolist() == [k != first for k in range(len(SIZES))]
