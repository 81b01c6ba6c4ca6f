"""Methods under a schedule: every one of them takes the steps that a schedule says, and says how far they went."""

import dataclasses

import pytest
import torch

from coterie.core.optimizers import SGD, Adam
from coterie.core.schedules import Constant, Cosine, Pacing, Step
from coterie.core.wrapped import Clipped, Paced
from coterie.data.minibatches import Plan
from coterie.experiment.simulation import Simulation
from coterie.methods import METHODS, FedAvg, PFedBreD, PFedMe, Scaffold
from coterie.methods.fields import with_optimizer
from coterie.testing import kit

from .quadratic import STACKED, federation, hessians, linear_terms, simulation, task

ROUNDS = 2
LR = 0.1


PLAN = Plan(batch_size=8)


def run(method, pacing=None, engine=kit.LOOP) -> Simulation:
    plan = dataclasses.replace(PLAN, pacing=pacing)
    method = method.scheduled(ROUNDS)
    sim = Simulation.start(method, kit.task(), kit.federation(), plan, len(kit.SIZES), seed=0)
    for number in range(1, ROUNDS + 1):
        sim.train(number, engine)
    return sim


@pytest.mark.parametrize("name", [name for name, cls in METHODS.items() if hasattr(cls(), "optimizer")])
def test_a_schedule_that_always_halves_is_half_the_step_size(name):
    """In everything that a method does with its step size; 0.5 lr is exact, so only the order of roundings differs."""
    method = METHODS[name]()
    expected = run(with_optimizer(method, SGD(0.1)))
    found = run(with_optimizer(method, Paced(SGD(0.2))), Pacing(Constant(0.5), ROUNDS))
    kit.same(found.state, expected.state, name, 1e-4)


def test_a_schedule_of_half_the_steps_stacks():
    """Other paces in every step, and clients of other lengths: stacked clients take them as one at a time."""
    for method in (FedAvg(Paced(Clipped(Adam(0.05), 0.5))), PFedMe(Paced(SGD(0.05)), prox_steps=2)):
        pacing = Pacing(Cosine(per="step"), ROUNDS)
        one, other = (run(method, pacing, engine) for engine in (kit.LOOP, kit.STACKED))
        kit.same(one.state, other.state, type(method).__name__, 1e-4)


PACING = Pacing(Cosine(per="step"), 6)


def scheduled(method, steps, rounds=0, pacing=PACING):
    sim = simulation(method, steps)
    sim.plan = dataclasses.replace(sim.plan, pacing=pacing)
    for number in range(1, rounds + 1):
        sim.train(number, STACKED)
    return sim


def test_sgd_takes_the_steps_that_the_schedule_says():
    """Each of 3 steps of the second round has the step size lr f(1 + k / 3)."""
    sim = scheduled(FedAvg(Paced(SGD(LR))), 3, rounds=1)
    x = sim.state.server["weight"].flatten()
    sim.train(2, STACKED)
    expected = 0
    for h, b, n in zip(hessians(), linear_terms(), (15, 20, 30), strict=True):
        y = x
        for pace in PACING.paces(2, 3).tolist():
            y = y - LR * pace * (h @ y - b)
        expected = expected + n / 65 * y
    torch.testing.assert_close(sim.state.server["weight"].flatten(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("control", ["path", "gradient"])
@pytest.mark.parametrize("pacing", [PACING, Pacing(Step(1, 0.5), 6)], ids=["per step", "per round"])
def test_scaffold_s_c_is_the_mean_of_all_c_i_under_a_schedule(control, pacing):
    method = Scaffold(Paced(SGD(LR)), control=control)
    sim = Simulation.start(method, task(), federation(), scheduled(method, 3, pacing=pacing).plan, 2, seed=0)
    for number in range(1, 6):
        sim.train(number, STACKED)
        mean = sim.state.clients["weight"].mean(0)
        torch.testing.assert_close(sim.state.server.c["weight"], mean, rtol=1e-6, atol=1e-8)
    assert sim.state.server.c["weight"].abs().max() > 0.01


@pytest.mark.parametrize("pacing", [PACING, Pacing(Step(1, 0.5), 6)], ids=["per step", "per round"])
def test_scaffold_s_control_variates_under_a_schedule(pacing):
    """(ii) with the way of each step over its own step size: c_i - c + (1 / K) sum_k (y_k - y_(k+1)) / lr_k.

    Where a round has one step size, this is the paper's c_i - c + (x - y_i) / (K lr).
    """
    sim = scheduled(Scaffold(Paced(SGD(LR))), 3, rounds=1, pacing=pacing)
    x, c = (part["weight"].flatten() for part in (sim.state.server.x, sim.state.server.c))
    before = sim.state.clients["weight"].flatten(1)
    sim.train(2, STACKED)
    sizes = [LR * pace for pace in pacing.paces(2, 3).tolist()]
    for k, (h, b) in enumerate(zip(hessians(), linear_terms(), strict=True)):
        y, ways = x, []
        for size in sizes:
            new = y - size * (h @ y - b - before[k] + c)
            ways.append((y - new) / size)
            y = new
        expected = before[k] - c + sum(ways) / 3
        found = sim.state.clients["weight"][k].flatten()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        if len(set(sizes)) == 1:
            torch.testing.assert_close(found, before[k] - c + (x - y) / (3 * sizes[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [PFedMe, lambda optimizer: PFedBreD(optimizer, strategy="none")])
def test_w_moves_by_one_step_of_the_size_that_is_due(method):
    """First order: w moves by lr_k times the gradient (`envelope_step`), so a small step of half the size goes half."""
    ways = []
    for factor in (1.0, 0.5):
        sim = scheduled(method(Paced(SGD(1e-4))), 1, pacing=Pacing(Constant(factor), 6))
        x = sim.state.server["weight"].clone()
        sim.train(1, STACKED)
        ways.append(sim.state.server["weight"] - x)
    torch.testing.assert_close(ways[1], ways[0] / 2, rtol=1e-2, atol=0)


def test_pfedme_by_hand_under_a_schedule():
    """Two minibatches with step sizes a: 2 steps on f + (lam / 2) ||. - w||^2, then w <- w - eta lam (w - theta)."""
    lam, pacing = 3.0, Pacing(Cosine(per="step"), 3)
    sim = scheduled(PFedMe(Paced(SGD(LR)), lam=lam, prox_steps=2, weighting="uniform"), 2, pacing=pacing)
    start = sim.state.server["weight"].flatten()
    sim.train(1, STACKED)
    ends = []
    for h, b in zip(hessians(), linear_terms(), strict=True):
        w = start
        for a in (LR * pacing.paces(1, 2)).tolist():
            theta = w
            for _ in range(2):
                theta = theta - a * (h @ theta - b + lam * (theta - w))
            w = w - a / (1 - (1 - a * lam) ** 2) * lam * (w - theta)
        ends.append(w)
    torch.testing.assert_close(sim.state.server["weight"].flatten(), sum(ends) / 3, rtol=1e-5, atol=1e-6)


def test_a_schedule_that_comes_to_nothing_leaves_finite_numbers():
    """Nobody divides by a pace of 0. These methods have step sizes or pulls that follow the optimiser's."""
    for name in ("fedmap", "fedamp", "pfedme", "pfedbred", "pfedbayes", "fedep-ft", "qlsd-ft", "apfl", "scaffold"):
        cls = METHODS[name]
        sim = run(with_optimizer(cls(), Paced(SGD(0.1))), Pacing(Step(1, 1e-30), ROUNDS))
        assert all(bool(torch.isfinite(leaf.float()).all()) for leaf in kit.tree.leaves(sim.state)), name


def test_fine_tuning_has_the_whole_step_size():
    """What is deployed after a schedule that has come down is fine-tuned all the same."""
    from coterie.methods import FedAvgFT

    pacing = Pacing(Step(1, 0.5), ROUNDS)
    views = []
    for lr, method in ((0.2, Paced(SGD(0.2))), (0.2, SGD(0.2))):
        sim = run(FedAvgFT(Paced(SGD(lr))), pacing)
        sim.method = with_optimizer(sim.method, method)
        views.append(sim.views(ROUNDS, kit.LOOP))
    kit.same(*views, "views", 1e-5)
