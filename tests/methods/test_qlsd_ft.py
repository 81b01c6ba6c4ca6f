import itertools

import numpy as np
import pytest
import torch
from torch import nn

from coterie import testing
from coterie.core import tree
from coterie.core.method import Population
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.data.federation import Federation, Split
from coterie.data.minibatches import Plan
from coterie.experiment.simulation import Simulation
from coterie.methods import QLSDFT, FedAvg
from coterie.methods.qlsd_ft import Up, _quantised
from coterie.testing.messages import messages, model

from .quadratic import SHARE, STACKED, hessians, linear_terms, simulation, task

CHAINS, SIZES = 4000, (8, 12, 20)


def test_without_noise_and_quantisation_it_is_gradient_descent():
    lr = 0.1
    sim = simulation(QLSDFT(SGD(lr), local_work="gradient", temperature=0, levels=0), steps=2)
    w = task().init()["weight"].flatten()
    for number in range(1, 6):
        sim.train(number, STACKED)
        w = w - lr * sum(share * (h @ w - b) for share, h, b in zip(SHARE, hessians(), linear_terms(), strict=True))
        torch.testing.assert_close(sim.state.server.w["weight"].flatten(), w, rtol=1e-6, atol=1e-8)


def test_with_epochs_and_without_noise_and_quantisation_it_is_fedavg():
    ours, theirs = testing.simulate(QLSDFT(SGD(0.1), temperature=0, levels=0)), testing.simulate(FedAvg(SGD(0.1)))
    testing.same(ours.state.server.w, theirs.state.server, "QLSD and FedAvg differ", tolerance=1e-6)


@pytest.mark.parametrize("levels", [1, 3, 127, 1000])
def test_the_quantiser_is_unbiased_and_its_variance_is_bounded(levels):
    values = {"a": torch.tensor([[0.7, -0.2], [0.05, 0.0]]), "b": torch.tensor([-3.0, 2.2])}
    draws = 4000
    decoded = []
    for key in range(draws):
        codes, scales = _quantised(values, levels, torch.tensor(key * 7_919_123_456_789))
        assert codes["a"].dtype == (torch.int8 if levels < 128 else torch.int16)
        decoded.append(tree.map(lambda code, scale: code * scale, codes, scales))
    for name, value in values.items():
        found = torch.stack([each[name] for each in decoded])
        bound = (float(value.abs().max()) / levels) ** 2 / 4
        assert (found.var(0) <= 1.1 * bound + 1e-12).all()
        torch.testing.assert_close(found.mean(0), value, rtol=1e-5, atol=5 * (bound / draws) ** 0.5)
    assert (found.var(0).max() > 0.2 * bound) or levels == 1, "or nothing is rounded"


def test_what_does_not_move_is_sent_as_0():
    codes, scales = _quantised({"a": torch.zeros(3)}, 127, torch.tensor(1))
    assert not codes["a"].any()
    assert float(scales["a"]) == 0


def chains() -> Federation:
    """Clients whose model has `CHAINS` coordinates of the same quadratic loss each, with targets that differ."""
    draw = torch.Generator().manual_seed(5)
    total = sum(SIZES)
    x = 0.5 + torch.rand(total, 1, generator=draw)
    y = torch.randn(total, 1, generator=draw).expand(total, CHAINS).clone()
    ends = np.cumsum([0, *SIZES])
    own = [np.arange(a, b) for a, b in itertools.pairwise(ends)]
    return Federation("chains", x, y, {f"c{k}": Split(part, part[:1], part[:1]) for k, part in enumerate(own)}, None)


@pytest.mark.parametrize("levels", [0, 127])
def test_the_stationary_distribution_is_the_exact_posterior(levels):
    """exp(-n f(w) / T) with f = a (w - c)^2 / 2 + const is N(c, T / (n a)); steps of size gamma widen its variance by
    1 / (1 - gamma a / 2). Each coordinate of the model is a chain of its own; they are looked at after 100 rounds.
    Quantised gradients add little: their variance is at most (largest / s)^2 / 4, near 0 where the noise is not.
    """
    data = chains()
    torch.manual_seed(0)
    model = Task(nn.Linear(1, CHAINS, bias=False), "regression")
    n, temperature = sum(SIZES), 0.5
    a = 2 * float((data.x**2).mean()) / CHAINS  # the loss is a mean over outputs
    c = float((data.x[:, 0] * data.y[:, 0]).sum() / (data.x**2).sum())
    lr = 0.2 / a
    method = QLSDFT(SGD(lr), local_work="gradient", temperature=temperature, levels=levels)
    sim = Simulation.start(method, model, data, Plan(max(SIZES), 1), len(SIZES), seed=0)
    for number in range(1, 101):
        sim.train(number, STACKED)
    w = sim.state.server.w["weight"].flatten().double()
    variance = temperature / (n * a) / (1 - lr * a / 2)
    assert float(w.mean()) == pytest.approx(c, abs=5 * (variance / CHAINS) ** 0.5)
    assert float(w.var()) == pytest.approx(variance, rel=5 * (2 / CHAINS) ** 0.5 + (0.01 if levels else 0))
    kurtosis = float(((w - w.mean()) ** 4).mean() / w.var() ** 2)
    assert kurtosis == pytest.approx(3, abs=5 * (24 / CHAINS) ** 0.5), "it is a Gaussian"


def test_noise_belongs_to_the_runs_seed_and_the_round():
    """With a step of nearly 0, w moves by noise alone."""

    def moves(seed: int) -> list[torch.Tensor]:
        sim = simulation(QLSDFT(SGD(1e-6), temperature=1e6), steps=1)
        sim = Simulation.start(sim.method, sim.task, sim.federation, sim.plan, 3, seed=seed)
        at = [sim.state.server.w["weight"]]
        for number in (1, 2):
            sim.train(number, STACKED)
            at.append(sim.state.server.w["weight"])
        return [after - before for before, after in itertools.pairwise(at)]

    (first, second), (again, _), (other, _) = moves(0), moves(0), moves(1)
    assert torch.equal(first, again)
    assert (first - second).abs().min() > 1e-3
    assert (first - other).abs().min() > 1e-3
    assert (second - other).abs().min() > 1e-3, "the next seed's rounds are not this one's"


def test_the_server_counts_rounds_from_0_whatever_the_seed_is():
    """Else the second round of one seed would draw the noise of the first round of the next."""
    method, params = QLSDFT(), {"w": torch.zeros(4)}
    servers = [method.init_server(params, Population(3, 3, seed=seed)) for seed in (6, 7)]
    assert [(int(each.seed), int(each.round), int(each.clients)) for each in servers] == [(6, 0, 3), (7, 0, 3)]
    still = Up({"w": torch.zeros(3, 4)}, {"w": torch.zeros(3)}, {}, torch.ones(3), torch.ones(3))
    first, other = (method.aggregate(each, torch.arange(3), still) for each in servers)
    second = method.aggregate(first._replace(w=params), torch.arange(3), still)
    assert not torch.equal(second.w["w"], other.w["w"])
    assert not torch.equal(second.w["w"], first.w["w"])


def test_a_message_has_a_byte_for_each_number():
    up = messages(QLSDFT()).up
    assert tree.nbytes(up.code) == sum(leaf.numel() for leaf in up.code.values())
    assert up.code.keys() == model().trainable


def test_scales_below_0_are_refused():
    up = messages(QLSDFT()).up
    assert QLSDFT().implausible(up, 23) is None
    lie = up._replace(scale={name: -1 - value for name, value in up.scale.items()})
    assert "below 0" in QLSDFT().implausible(lie, 23)
