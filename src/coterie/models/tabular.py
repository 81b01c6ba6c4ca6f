"""A network for tables."""

from __future__ import annotations

import math

from torch import nn


def tabular(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """For tables of numbers and categories: in-64-32-out with ReLU and LayerNorm.

    Narrow, because sites have hundreds of rows and tens of columns: about 3,000 parameters for 13 inputs. LayerNorm
    normalises each row by itself: it keeps no statistics of a site that averaging would mix, as BatchNorm does, and
    works in minibatches of one row. No dropout: rounds are selected on validation data, which stops before overfitting.
    """
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(math.prod(shape), 64), nn.LayerNorm(64), nn.ReLU()),
        *(nn.Linear(64, 32), nn.LayerNorm(32), nn.ReLU()),
        nn.Linear(32, outputs),
    )
