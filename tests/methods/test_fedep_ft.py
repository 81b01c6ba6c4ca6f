import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from coterie import testing
from coterie.core import tree
from coterie.core.method import Newcomer
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.data.federation import Federation, Split
from coterie.data.minibatches import Plan
from coterie.experiment.simulation import Simulation
from coterie.experiment.take_home.onboard import Guest
from coterie.methods import FedEPFT, Local
from coterie.methods.fedep_ft import _curvature
from coterie.storage.state import State

from . import quadratic
from .quadratic import STACKED

SIZES, DIM, PRIOR = (12, 18, 24), 3, 0.5


def axes() -> Federation:
    """Clients whose inputs have one number that is not 0 each, so that their Hessians are diagonal."""
    draw = torch.Generator().manual_seed(3)
    total = sum(SIZES)
    values = 0.6 + torch.rand(total, generator=draw, dtype=torch.float64)
    x = torch.eye(DIM, dtype=torch.float64)[torch.arange(total) % DIM] * values[:, None]
    y = torch.randn(total, generator=draw, dtype=torch.float64)
    ends = np.cumsum([0, *SIZES])
    own = [np.arange(a, b) for a, b in itertools.pairwise(ends)]
    return Federation("axes", x, y, {f"c{k}": Split(part, part[:1], part[:1]) for k, part in enumerate(own)}, None)


def task() -> Task:
    torch.manual_seed(0)
    return Task(nn.Linear(DIM, 1, bias=False).double(), "regression")


def start(method, data: Federation, steps: int = 300) -> Simulation:
    plan = Plan(batch_size=max(SIZES), epochs=steps)
    return Simulation.start(method, task(), data, plan, len(data.names), seed=0)


def exact(data: Federation) -> tuple[torch.Tensor, torch.Tensor]:
    """Every client's precision n_k H_k and precision times mean n_k b_k, of exp(-n_k f_k): [clients, DIM] each."""
    own = [torch.from_numpy(split.train) for split in data.clients.values()]
    precision = [2 * (data.x[rows] ** 2).sum(0) for rows in own]
    return torch.stack(precision), torch.stack([2 * data.x[rows].T @ data.y[rows] for rows in own])


@pytest.mark.parametrize("damping", [1.0, 0.5])
def test_sites_converge_to_the_exact_product_posterior(damping):
    """Gaussian sites are found exactly: after t rounds they have 1 - (1 - damping)^t of their precisions and means."""
    data = axes()
    precision, linear = exact(data)
    sim = start(FedEPFT(SGD(0.3), damping=damping, prior=PRIOR), data)
    begin = task().init()["weight"].flatten()
    for number in (1, 2, 3):
        sim.train(number, STACKED)
        share = 1 - (1 - damping) ** number
        whole = PRIOR + share * precision.sum(0)
        mean = (PRIOR * begin + share * linear.sum(0)) / whole
        torch.testing.assert_close(sim.state.server.precision["weight"].flatten(), whole, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(sim.state.server.w["weight"].flatten(), mean, rtol=1e-6, atol=1e-8)
        sites = sim.state.clients
        torch.testing.assert_close(sites.precision["weight"][:, 0], share * precision, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(sites.natural["weight"][:, 0], share * linear, rtol=1e-6, atol=1e-8)


def test_auto_damping_is_one_over_the_clients_of_a_round():
    auto, third = (start(FedEPFT(SGD(0.3), damping=d), axes(), steps=5) for d in ("auto", 1 / 3))
    for sim in (auto, third):
        sim.train(1, STACKED)
    testing.same(auto.state, third.state, "auto and 1/3 differ", tolerance=1e-7)


def test_with_auto_damping_the_mean_is_that_of_the_tilted_means_by_their_precisions():
    """Hessians that are not diagonal, and clients that do not finish: whatever theta_i is, w is their weighted mean."""
    method = FedEPFT(SGD(0.05))
    sim = quadratic.simulation(method, steps=2)
    sim.train(1, STACKED)
    sites, before = sim.state.clients, sim.state.server
    sim.train(2, STACKED)
    after = sim.state.clients
    w, name = before.w["weight"], "weight"
    cavity = before.precision[name] - sites.precision[name]
    new = sites.precision[name] + 3 * (after.precision[name] - sites.precision[name])
    change = after.precision[name] - sites.precision[name]
    shift = after.natural[name] - sites.natural[name] - change * w
    theta = w + 3 * shift / (new + cavity)
    expected = ((new + cavity) * theta).sum(0) / (new + cavity).sum(0)
    torch.testing.assert_close(sim.state.server.w[name], expected)


def test_one_client_gets_its_own_posterior():
    data = axes()
    one = dataclasses.replace(data, clients={"c1": data.clients["c1"]})
    precision, linear = exact(one)
    sim = start(FedEPFT(SGD(0.3), prior=PRIOR), one)
    sim.train(1, STACKED)
    sim.train(2, STACKED)
    begin = task().init()["weight"].flatten()
    mean = (PRIOR * begin + linear[0]) / (PRIOR + precision[0])
    torch.testing.assert_close(sim.state.server.w["weight"].flatten(), mean, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(sim.state.server.precision["weight"].flatten(), PRIOR + precision[0])


def test_a_newcomer_adds_its_site_to_its_own_copy():
    data = axes()
    precision, linear = exact(data)
    method = FedEPFT(SGD(0.3), damping=1.0, prior=PRIOR)
    sim = start(method, dataclasses.replace(data, clients={name: data.clients[name] for name in ("c0", "c1")}))
    sim.train(1, STACKED)
    finished = sim.state.server
    sim = start(method, dataclasses.replace(data, clients={"c2": data.clients["c2"]}))
    sim.place, sim.state = Guest(task(), Newcomer(finished, task().init()), 0), State(finished, sim.state.clients)
    for number in (1, 2):
        sim.train(number, STACKED)
        mean = (PRIOR * task().init()["weight"].flatten() + linear.sum(0)) / (PRIOR + precision.sum(0))
        torch.testing.assert_close(sim.state.server.w["weight"].flatten(), mean, rtol=1e-6, atol=1e-8)


def test_one_client_deploys_what_its_solver_made():
    """Before fine-tuning, w is theta_1, on a network whose Hessian is anything (law 9 in this method's terms)."""
    name = testing.federation().names[1]
    one = dataclasses.replace(testing.federation(), clients={name: testing.federation().clients[name]})
    method = FedEPFT(SGD(0.1), prior=1e-6)  # a prior that does not pull
    sim = testing.simulate(method, rounds=1, participants=1, clients=one)
    alone = testing.simulate(Local(SGD(0.1)), rounds=1, participants=1, clients=one)
    theta = tree.rows(alone.state.clients, 0)
    ours, theirs = (testing.task().sent(each) for each in (sim.state.server.w, theta))
    testing.same(ours, theirs, "FedEP and local training differ", tolerance=1e-4)


def test_the_curvature_of_a_diagonal_hessian_is_exact_and_else_right_on_average():
    sim = start(FedEPFT(), axes(), steps=1)
    drawn = sim._draw([0], sim.plan, "minibatches", 1)
    own = tree.rows(drawn._replace(x=drawn.x[None], y=drawn.y[None]), 0)
    found = _curvature(task(), task().init(), own)["weight"].flatten()
    torch.testing.assert_close(found, exact(axes())[0][0] / SIZES[0])
    dense = quadratic.simulation(FedEPFT(), steps=400)  # 400 minibatches, each with signs of its own
    drawn = dense._draw([2], dense.plan, "minibatches", 1)
    own = tree.rows(drawn._replace(x=drawn.x[None], y=drawn.y[None]), 0)
    hessian = quadratic.hessians()[2]
    found = _curvature(quadratic.task(), quadratic.task().init(), own)["weight"].flatten()
    # v_j (H v)_j has variance sum_{k != j} H_jk^2: five standard errors.
    noise = ((hessian**2).sum(1) - hessian.diagonal() ** 2).sqrt() / 400**0.5
    assert ((found - hessian.diagonal()).abs() < 5 * noise).all()


def test_a_pull_stronger_than_a_step_can_follow_just_reaches_the_cavity():
    method = FedEPFT(SGD(0.5))
    strength = method._strength({"w": torch.tensor([1.0, 1000.0])}, torch.tensor(10.0))
    assert strength["w"].tolist() == pytest.approx([0.1, 2.0])
