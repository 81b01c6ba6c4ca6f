"""A model for tables."""

from __future__ import annotations

import math

from torch import nn


def tabular(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """For tables of numbers and categories: in-64-32-out with ReLU and LayerNorm.

    It is narrow, because sites have hundreds of rows and tens of columns: about 3,000 parameters for 13 inputs.
    LayerNorm normalises each row by itself, so it keeps no statistics of a site for averaging to mix, as BatchNorm
    does, and works in minibatches of one row. There is no dropout: selecting rounds on validation data stops before
    overfitting.
    """
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(math.prod(shape), 64), nn.LayerNorm(64), nn.ReLU()),
        *(nn.Linear(64, 32), nn.LayerNorm(32), nn.ReLU()),
        nn.Linear(32, outputs),
    )
