"""A federation whose local losses are quadratic, so that minimisers are known in closed form.

Client k has f_k(w) = (1/n_k) sum_i (x_i . w - y_i)^2 = w' H_k w / 2 - b_k . w + const, with H_k = 2 X'X / n_k and
b_k = 2 X'y / n_k. One minibatch holds all of a client's examples, so a step is exact gradient descent on f_k + penalty.
"""

import numpy as np
import torch
from torch import nn

from coterie.core.task import Task
from coterie.data.federation import Federation, Split
from coterie.data.minibatches import Plan
from coterie.engine import Engine
from coterie.experiment.simulation import Simulation

DIM = 4
SIZES = (15, 20, 30)


def federation() -> Federation:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(sum(SIZES), DIM, generator=draw, dtype=torch.float64)
    y = torch.randn(sum(SIZES), generator=draw, dtype=torch.float64)
    clients, start = {}, 0
    for k, size in enumerate(SIZES):
        own = np.arange(start, start + size)
        clients[f"client-{k}"] = Split(own, own[:1], own[:1])
        start += size
    return Federation("quadratic", x, y, clients, None)


def task() -> Task:
    torch.manual_seed(0)
    return Task(nn.Linear(DIM, 1, bias=False).double(), "regression")


def simulation(method, steps: int) -> Simulation:
    plan = Plan(batch_size=max(SIZES), epochs=steps)
    return Simulation.start(method, task(), federation(), plan, len(SIZES), seed=0)


def hessians() -> list[torch.Tensor]:
    data = federation()
    xs = [data.x[torch.from_numpy(split.train)] for split in data.clients.values()]
    return [2 * x.T @ x / len(x) for x in xs]


def linear_terms() -> list[torch.Tensor]:
    data = federation()
    rows = [torch.from_numpy(split.train) for split in data.clients.values()]
    return [2 * data.x[own].T @ data.y[own] / len(own) for own in rows]


def loss(k: int, w: torch.Tensor) -> torch.Tensor:
    """f_k, independently of the library."""
    data = federation()
    own = torch.from_numpy(data.split(k).train)
    return ((data.x[own] @ w - data.y[own]) ** 2).mean()


LOOP = Engine("loop")
STACKED = Engine("stacked")
SHARE = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
