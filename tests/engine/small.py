"""A small federation and a simulation on it, for tests of engines."""

import numpy as np
import torch
from torch import nn

from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.data import from_clients
from coterie.data.minibatches import Plan
from coterie.experiment.simulation import Simulation
from coterie.methods import FedAvg


def federation(sizes=(10, 40, 3, 25, 25), classes=3):
    draw = np.random.default_rng(0)
    clients = {}
    for i, size in enumerate(sizes):
        x = torch.from_numpy(draw.standard_normal((size, 6)).astype(np.float32))
        clients[f"c{i}"] = (x, torch.from_numpy(draw.integers(classes, size=size)))
    return from_clients(clients, num_classes=classes)


def simulation(method=None, sizes=(10, 40, 3, 25, 25), participants=5, norm=False):
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(8), nn.Dropout(0.3)] if norm else []
    task = Task(nn.Sequential(nn.Linear(6, 8), *middle, nn.ReLU(), nn.Linear(8, 3)), num_classes=3)
    return Simulation.start(method or FedAvg(SGD(0.1)), task, federation(sizes), Plan(4, 2), participants, seed=0)
