"""Six clients of two kinds: the second kind's labels are the first kind's, swapped. No single model fits both."""

import numpy as np
import torch
from torch import nn

from coterie.core.task import Task
from coterie.data.federation import Federation, Split
from coterie.data.minibatches import Plan
from coterie.experiment.simulation import Simulation

KINDS = ((0, 1, 2), (3, 4, 5))
SIZE = 40


def federation() -> Federation:
    x = torch.randn(6 * SIZE, 5, generator=torch.Generator().manual_seed(4))
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    y[3 * SIZE :] = 1 - y[3 * SIZE :]
    rows = [np.arange(k * SIZE, (k + 1) * SIZE) for k in range(6)]
    return Federation("planted", x, y, {f"site-{k}": Split(r[:30], r[30:35], r[35:]) for k, r in enumerate(rows)}, 2)


def simulation(method) -> Simulation:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        task = Task(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)), num_classes=2)
    return Simulation.start(method, task, federation(), Plan(batch_size=10, epochs=3), 6, seed=0)
