"""Data sets by name, with the model and training settings that go with them unless the user says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from coterie.data import partition
from coterie.data.federation import Federation, from_clients
from coterie.data.pfedbred import pfedbred
from coterie.data.synthetic import synthetic
from coterie.errors import ConfigError


@dataclass(frozen=True)
class Source:
    """`load(name, seed, validation, test)` makes the federation; `defaults` are configuration keys."""

    load: Callable[[str, int, float, float], Federation]
    about: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


# FedMAP's schedule and optimiser, from the authors' configuration.
_FEDMAP = {
    "model": "mlp",
    "rounds": 20,
    "local_epochs": 50,
    "batch_size": 64,
    "optimizer": {"name": "adam", "lr": 1e-4},
}


def _feature(name: str, seed: int, validation: float, test: float) -> Federation:
    return synthetic(name, seed, validation=validation, test=test)


def _quantity(name: str, seed: int, validation: float, test: float) -> Federation:
    return synthetic(name, seed, sizes=(2000,) * 5 + (500,) * 5, validation=validation, test=test)


def _label(name: str, seed: int, validation: float, test: float) -> Federation:
    return synthetic(name, seed, share_of_0=(0.5,) * 5 + (0.85,) * 5, validation=validation, test=test)


def _digits(name: str, seed: int, validation: float, test: float) -> Federation:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    parts = partition.dirichlet(y, clients=10, alpha=0.3, seed=seed, min_size=20)
    images = torch.from_numpy((x / 16).astype(np.float32)).reshape(-1, 1, 8, 8)
    labels = torch.from_numpy(y.astype(np.int64))
    clients = [(images[part], labels[part]) for part in parts]
    return from_clients(clients, name=name, num_classes=10, validation=validation, test=test, seed=seed)


def _pfedbred_mnist(name: str, seed: int, validation: float, test: float) -> Federation:
    return pfedbred(name, "mnist", 3, seed, validation, test, slot_labels=True)


def _pfedbred_mnist_clean(name: str, seed: int, validation: float, test: float) -> Federation:
    return pfedbred(name, "mnist", 3, seed, validation, test, slot_labels=False)


def _pfedbred_fmnist(name: str, seed: int, validation: float, test: float) -> Federation:
    return pfedbred(name, "fashion-mnist", 2, seed, validation, test, slot_labels=False)


# pFedBreD's schedule, from the authors' scripts.
_PFEDBRED = {
    **{"model": "linear", "rounds": 200, "local_steps": 20, "batch_size": 20, "clients_heard": 20},
    **{"test": 0.25, "optimizer": {"name": "sgd", "lr": 0.01}},
}

SOURCES: dict[str, Source] = {
    "synthetic-feature-skew": Source(_feature, "FedMAP's feature skew: 10 clients x 2,000, 30 features", _FEDMAP),
    "synthetic-quantity-skew": Source(_quantity, "FedMAP's quantity skew: 5 x 2,000 and 5 x 500 examples", _FEDMAP),
    "synthetic-label-skew": Source(_label, "FedMAP's label skew: 5 clients balanced, 5 with 85 % of class 0", _FEDMAP),
    "pfedbred-mnist": Source(
        _pfedbred_mnist,
        "pFedBreD's MNIST: 100 users of 3 digits, with the wrong labels of the authors' data",
        _PFEDBRED,
    ),
    "pfedbred-mnist-clean": Source(_pfedbred_mnist_clean, "pFedBreD's MNIST with right labels", _PFEDBRED),
    "pfedbred-fmnist": Source(_pfedbred_fmnist, "pFedBreD's Fashion-MNIST: 100 users of 2 classes", _PFEDBRED),
    "digits": Source(
        _digits,
        "scikit-learn's 8x8 digits, 1,797 images, 10 clients by Dirichlet(0.3) over the classes",
        {"model": "mlp", "rounds": 30, "local_epochs": 1, "batch_size": 10, "optimizer": {"name": "sgd", "lr": 0.05}},
    ),
}


def load(name: str, seed: int, validation: float = 0.1, test: float = 0.3) -> Federation:
    if name not in SOURCES:
        raise ConfigError([f"there is no data set '{name}'; there are {', '.join(SOURCES)}"])
    return SOURCES[name].load(name, seed, validation, test)
