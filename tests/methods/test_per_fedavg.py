import dataclasses

import pytest
import torch

from coterie.core.optimizers import SGD
from coterie.data.minibatches import Plan
from coterie.experiment.simulation import Simulation
from coterie.methods import PerFedAvg

from .quadratic import DIM, LOOP, SHARE, STACKED, federation, hessians, linear_terms, simulation, task

B, ALPHA = 0.1, 0.07
METHOD = PerFedAvg(SGD(B), alpha=ALPHA)
EYE = torch.eye(DIM, dtype=torch.float64)


def test_one_iteration_on_two_minibatches():
    """w - b grad f_B2(w - alpha grad f_B1(w)): first B1, B2 = minibatches 0 and 1, then 1 and 0."""
    data = federation()
    plan = Plan(batch_size=8, epochs=1)  # the first client has 15 examples: minibatches of 8 and 7
    sim = Simulation.start(METHOD, task(), data, plan, 3, seed=0)
    batches = sim._draw([0], plan, "minibatches", 1)
    one = batches._replace(index=batches.index[0], mask=batches.mask[0], key=batches.key[0], count=batches.count[0])
    _, up, _ = METHOD.local_update(sim.task, (), sim.state.server, one)

    def gradient(w, step):
        rows = one.index[0, step][one.mask[0, step] > 0]
        return 2 * data.x[rows].T @ (data.x[rows] @ w - data.y[rows]) / len(rows)

    w = sim.state.server["weight"].flatten()
    for first, second in ((0, 1), (1, 0)):
        w = w - B * gradient(w - ALPHA * gradient(w, first), second)
    torch.testing.assert_close(up.params["weight"].flatten(), w, rtol=1e-6, atol=1e-7)


def test_a_round_on_whole_data():
    """With all data in each minibatch: g = H (w - alpha (H w - b)) - b, averaged by n_k."""
    sim = simulation(METHOD, steps=1)
    w = sim.state.server["weight"].flatten()
    sim.train(1, STACKED)
    expected = w - B * sum(
        s * (h @ (w - ALPHA * (h @ w - b)) - b) for s, h, b in zip(SHARE, hessians(), linear_terms(), strict=True)
    )
    torch.testing.assert_close(sim.state.server["weight"].flatten(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("adapt_steps", [0, 1, 4])
def test_adaptation_takes_so_many_steps_from_w(adapt_steps):
    sim = simulation(dataclasses.replace(METHOD, adapt_steps=adapt_steps), steps=1)
    sim.train(1, STACKED)
    w = sim.state.server["weight"].flatten()
    views = sim.views(1, LOOP)["weight"]
    for k, (h, b) in enumerate(zip(hessians(), linear_terms(), strict=True)):
        star = torch.linalg.solve(h, b)
        shrink = torch.linalg.matrix_power(EYE - ALPHA * h, adapt_steps)
        torch.testing.assert_close(views[k].flatten(), star + shrink @ (w - star), rtol=1e-6, atol=1e-7)


def test_adaptation_uses_one_minibatch_a_step_and_no_test_data():
    """With minibatches of 8, one step sees 8 examples; what is not training data may be anything."""
    data = federation()
    clients = {
        name: dataclasses.replace(split, train=split.train[:-4], validation=split.train[-4:-2], test=split.train[-2:])
        for name, split in data.clients.items()
    }
    data = dataclasses.replace(data, clients=clients)
    train = torch.cat([torch.from_numpy(split.train) for split in clients.values()])
    broken = torch.full_like(data.x, 1e6).index_copy(0, train, data.x[train])
    views = []
    for x in (data.x, broken):
        sim = Simulation.start(METHOD, task(), dataclasses.replace(data, x=x), Plan(8, 1), 3, seed=0)
        views.append(sim.views(1, LOOP)["weight"])
    assert torch.equal(*views)
    batches = sim._draw([0], Plan(8, 1), "personalize", 1)
    rows, w = batches.index[0, 0, 0], sim.state.server["weight"].flatten()
    step = 2 * data.x[rows].T @ (data.x[rows] @ w - data.y[rows]) / len(rows)
    torch.testing.assert_close(views[0][0].flatten(), w - ALPHA * step, rtol=1e-6, atol=1e-7)
