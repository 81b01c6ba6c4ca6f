"""Linear models and perceptrons. Each takes the shape of one input and the number of outputs."""

from __future__ import annotations

import itertools
import math

from torch import nn


def mlp(shape: tuple[int, ...], outputs: int, *, hidden: tuple[int, ...] = (32, 16)) -> nn.Module:
    """FedMAP's multi-layer perceptron: in-32-16-out with ReLU (its Table 3; two logits for its one sigmoid).

    FedeRiCo's for Office-Home is `mlp:hidden=1000/200`.
    """
    widths = (math.prod(shape), *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


def linear(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Multinomial logistic regression (pFedBreD's MCLR), or linear regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs))


def dnn(shape: tuple[int, ...], outputs: int, *, hidden: int = 100) -> nn.Module:
    """pFedBreD's DNN: in-100-out with leaky ReLU."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.LeakyReLU(0.1), nn.Linear(hidden, outputs)
    )
