"""The papers' networks that the foundation needs. Each takes the shape of one input and the number of outputs."""

from __future__ import annotations

import math

from torch import nn


def mlp(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """FedMAP's multi-layer perceptron: in-32-16-out with ReLU (its Table 3; two logits for its one sigmoid)."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, outputs)
    )


def linear(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Multinomial logistic regression (pFedBreD's MCLR), or linear regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs))


def dnn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """pFedBreD's DNN: in-100-out with leaky ReLU."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 100), nn.LeakyReLU(0.1), nn.Linear(100, outputs))


def cnn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """pFedVMP's network: two 5x5 convolutions (32 and 64 channels) with max pooling, 512 features, a linear head."""
    if len(shape) != 3 or min(shape[1:]) < 16:
        raise ValueError(
            f"this network needs images of at least 16 x 16 pixels as (channels, height, width), not {shape}"
        )
    channels, height, width = shape
    high, wide = (((size - 4) // 2 - 4) // 2 for size in (height, width))
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 5), nn.LeakyReLU(0.1), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.LeakyReLU(0.1), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * high * wide, 512), nn.LeakyReLU(0.1)),
        nn.Linear(512, outputs),
    )
