import dataclasses

import pytest
import torch

from coterie.core.optimizers import SGD, Adam
from coterie.experiment.simulation import Simulation
from coterie.methods import FedAvg, Scaffold

from .quadratic import LOOP, STACKED, federation, hessians, linear_terms, simulation, task

LR = 0.1


@pytest.mark.parametrize("control", ["path", "gradient"])
@pytest.mark.parametrize("participants", [1, 2, 3])
def test_c_is_the_mean_of_all_c_i(control, participants):
    """After every round, whoever took part; and the control variates are not all 0."""
    method = Scaffold(SGD(LR), control=control)
    sim = Simulation.start(method, task(), federation(), simulation(method, 3).plan, participants, seed=0)
    for number in range(1, 6):
        sim.train(number, STACKED)
        mean = sim.state.clients["weight"].mean(0)
        torch.testing.assert_close(sim.state.server.c["weight"], mean, rtol=1e-6, atol=1e-8)
    assert sim.state.server.c["weight"].abs().max() > 0.01


@pytest.mark.parametrize("control", ["path", "gradient"])
def test_control_variates_are_those_of_the_algorithm(control):
    """Second round (c_i and c no longer 0), K = 3: (ii) c_i - c + (x - y_i) / (K lr), or (i) grad f_i(x)."""
    sim = simulation(Scaffold(SGD(LR), control=control), steps=3)
    sim.train(1, STACKED)
    x, c = (part["weight"].flatten() for part in (sim.state.server.x, sim.state.server.c))
    before = sim.state.clients["weight"].flatten(1)
    sim.train(2, STACKED)
    ys = []
    for k, (h, b) in enumerate(zip(hessians(), linear_terms(), strict=True)):
        y = x
        for _ in range(3):
            y = y - LR * (h @ y - b - before[k] + c)
        ys.append(y)
        expected = before[k] - c + (x - y) / (3 * LR) if control == "path" else h @ x - b
        torch.testing.assert_close(sim.state.clients["weight"][k].flatten(), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(sim.state.server.x["weight"].flatten(), sum(ys) / 3, rtol=1e-6, atol=1e-7)


def test_server_step_size():
    """x <- x + eta_g mean(y_i - x): in the first round y_i is plain SGD's."""
    sims = [simulation(Scaffold(SGD(LR), server_lr=eta), steps=2) for eta in (1.0, 0.5)]
    x = sims[0].state.server.x["weight"]
    for sim in sims:
        sim.train(1, LOOP)
    whole, half = (sim.state.server.x["weight"] for sim in sims)
    torch.testing.assert_close(half, (x + whole) / 2)


@pytest.mark.parametrize("optimizer", [SGD(LR), Adam(0.01)], ids=["sgd", "adam"])
@pytest.mark.parametrize("control", ["path", "gradient"])
def test_alone_it_is_fedavg(optimizer, control):
    """With one client c_i = c in every round, so that the corrections cancel."""
    data = federation()
    data = dataclasses.replace(data, clients={"client-0": data.clients["client-0"]})
    sims = []
    for method in (Scaffold(optimizer, control=control), FedAvg(optimizer)):
        sims.append(Simulation.start(method, task(), data, simulation(method, 3).plan, 1, seed=0))
        for number in (1, 2, 3):
            sims[-1].train(number, LOOP)
    ours, theirs = sims[0].state.server.x["weight"], sims[1].state.server["weight"]
    # Adam counts its steps in float32, and the step size that it divides is a float here and a tensor in FedAvg.
    near = 1e-12 if isinstance(optimizer, SGD) else 1e-7
    torch.testing.assert_close(ours, theirs, rtol=near, atol=near)


@pytest.mark.parametrize("method", [Scaffold(SGD(LR)), Scaffold(SGD(LR), control="gradient"), FedAvg(SGD(LR))], ids=str)
def test_many_local_steps_still_reach_the_global_minimiser(method):
    """The point of the paper: no drift. FedAvg with as many local steps ends elsewhere."""
    minimiser = torch.linalg.solve(sum(hessians()), sum(linear_terms()))
    sim = simulation(method, steps=4)
    for number in range(1, 51):
        sim.train(number, STACKED)
    if isinstance(method, Scaffold):
        torch.testing.assert_close(sim.state.server.x["weight"].flatten(), minimiser, rtol=1e-5, atol=1e-6)
    else:
        assert (sim.state.server["weight"].flatten() - minimiser).abs().max() > 1e-3
