"""Data that needs no files: scikit-learn's digits and breast cancer, FedMAP's regression A.4, FedeRiCo's sine."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from coterie.core import rng
from coterie.data import partition
from coterie.data.federation import Federation, Split, from_clients
from coterie.data.pool import Pool

SINE_CLIENTS, SINE_POINTS, SINE_NOISE = 10, 24, 0.3
A4_SIZES = (60, 1, 2, 3, 50)
A4_VALIDATION, A4_TEST = 20, 40


def digits_pool() -> Pool:
    """Return scikit-learn's 1,797 digits as images of 8 x 8 pixels."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    images = torch.from_numpy((x / 16).astype(np.float32)).reshape(-1, 1, 8, 8)
    return Pool("digits", images, torch.from_numpy(y.astype(np.int64)), 10, tuple("0123456789"))


def digits(name: str, seed: int, validation: float, test: float) -> Federation:
    """Split the digits among 10 clients by Dirichlet(0.3)."""
    pool = digits_pool()
    parts = partition.dirichlet(pool.y.numpy(), clients=10, alpha=0.3, seed=seed, min_size=20)
    clients = [(pool.x[part], pool.y[part]) for part in parts]
    return from_clients(clients, name=name, num_classes=10, validation=validation, test=test, seed=seed)


def breast_cancer_pool() -> Pool:
    """Return 569 tumours with 30 features, malignant or benign; each client standardises its features."""
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    x, y = torch.from_numpy(bunch.data.astype(np.float32)), torch.from_numpy(bunch.target.astype(np.int64))
    return Pool("breast-cancer", x, y, 2, tuple(map(str, bunch.target_names)), standardize=True)


def sine_pieces(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Draw the points of FedeRiCo's Figure 1: client i has x in the i-th of 10 equal pieces of [-1, 1].

    Each client has 24 points with y = sin(pi x) + 0.3 N(0, 1).
    """
    draw = torch.Generator().manual_seed(seed)
    xs = [2 * (torch.rand(SINE_POINTS, 1, generator=draw) + i) / SINE_CLIENTS - 1 for i in range(SINE_CLIENTS)]
    noise = [SINE_NOISE * torch.randn(SINE_POINTS, generator=draw) for _ in xs]
    return [(x, torch.sin(torch.pi * x[:, 0]) + each) for x, each in zip(xs, noise, strict=True)]


def sine(name: str, seed: int, validation: float, test: float) -> Federation:
    """Make a federation of `sine_pieces`."""
    return from_clients(sine_pieces(seed), name=name, validation=validation, test=test, seed=seed)


def a4_points(k: int, size: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw points of client k = 0, ..., 4 in FedMAP's appendix A.4: x ~ N(k, 1), y = -x + 4 k + N(0, variance 0.8)."""
    x = k + draw.standard_normal(size)
    return x, -x + 4 * k + np.sqrt(0.8) * draw.standard_normal(size)


def linear_regression_a4(name: str, seed: int, validation: float, test: float) -> Federation:
    """Make FedMAP's federation of five clients with 60, 1, 2, 3 and 50 training points.

    As in the paper, test points are drawn separately: 40 per client, and 20 for validation. The shares `validation` and
    `test` do not apply.
    """
    xs, ys, clients, start = [], [], {}, 0
    for k, size in enumerate(A4_SIZES):
        x, y = a4_points(k, size + A4_VALIDATION + A4_TEST, rng.generator(seed, name, k))
        cut = np.split(start + np.arange(len(x)), [size, size + A4_VALIDATION])
        clients[f"client-{k + 1}"] = Split(*cut)
        xs.append(x)
        ys.append(y)
        start += len(x)
    x_all, y_all = (torch.from_numpy(np.concatenate(part).astype(np.float32)) for part in (xs, ys))
    return Federation(name, x_all[:, None], y_all, clients, None)
