"""Measures how evenly a metric is spread over the clients."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.metrics import better, mean

Array = NDArray[np.float64]


def spread(values: Array, sizes: Array, metric: str) -> dict[str, float]:
    """Summarise the spread of `values` [clients] with `sizes` [clients] test examples; NaN values are left out.

    mean           unweighted
    weighted_mean  weighted by the number of test examples
    std            over clients: the root of the mean squared deviation (n in the denominator: these are all clients)
    cv             std / mean, the coefficient of variation of pFedVMP's Table 3; NaN where the mean is 0
    worst_decile   the mean of the tenth of clients (at least one) that do worst
    """
    there = values[~np.isnan(values)]
    if not len(there):
        return dict.fromkeys(("mean", "weighted_mean", "std", "cv", "worst_decile"), math.nan)
    middle, std = float(there.mean()), float(there.std())
    worst_first = np.sort(there) if better(metric) is max else -np.sort(-there)
    return {
        "mean": middle,
        "weighted_mean": mean(values, sizes),
        "std": std,
        "cv": std / middle if middle else math.nan,
        "worst_decile": float(worst_first[: math.ceil(len(there) / 10)].mean()),
    }


def share_worse(gains: Array) -> float:
    """Return the share of clients that do worse than alone, among those whose gain is defined."""
    there = gains[~np.isnan(gains)]
    return float((there < 0).mean()) if len(there) else math.nan
