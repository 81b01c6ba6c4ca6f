"""Computes Wilcoxon's signed-rank test over clients, as in FedAMP's paper, and its effect size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_EXACT_DIFFERENCES = 50  # up to which the test is exact


def signed_rank(differences: NDArray[np.float64]) -> dict[str, Any]:
    """Run the two-sided test on paired differences, one per client; `n` counts those that are neither 0 nor NaN.

    statistic  min(W+, W-), sums of the ranks of |d| over positive and negative d
    p          exact up to 50 differences, by counting sign patterns, with ties (scipy's exact test allows none);
               beyond, scipy's normal approximation. It is at least 2^(1 - n): five clients never reach 0.05
    effect     the matched-pairs rank-biserial correlation (W+ - W-) / (W+ + W-): 1 if all gain, -1 if all lose
    With nothing but zeros there is no evidence either way: p = 1 and effect = 0.
    """
    there = np.round(differences[~np.isnan(differences)], 12)  # 0.3 - 0.2 and 0.1 are a tie
    there = there[there != 0]
    number = len(there)
    if not number:
        return {"statistic": 0.0, "p": 1.0, "effect": 0.0, "n": 0}
    ranks = _ranks(np.abs(there))
    plus = float(ranks[there > 0].sum())
    minus = float(ranks[there < 0].sum())
    p = _exact(ranks, plus) if number <= MAX_EXACT_DIFFERENCES else _approximate(there)
    return {"statistic": min(plus, minus), "p": p, "effect": (plus - minus) / (plus + minus), "n": number}


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ranks, from 1; equal values share the mean of theirs."""
    _, group, size = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (size.cumsum() - (size - 1) / 2)[group]
    return ranks


def _approximate(differences: NDArray[np.float64]) -> float:
    from scipy import stats  # here, since importing it takes half a second

    return float(stats.wilcoxon(differences, method="approx").pvalue)


def _exact(ranks: NDArray[np.float64], plus: float) -> float:
    """Return 2 min(P(W+ <= w), P(W+ >= w)), at most 1, if each rank has either sign with probability 1/2."""
    steps = np.rint(2 * ranks).astype(int)  # ties have half ranks; twice a rank is whole
    chance = np.zeros(steps.sum() + 1)
    chance[0] = 1.0
    for step in steps:
        chance[step:] = (chance[step:] + chance[:-step]) / 2
        chance[:step] /= 2
    at = math.floor(2 * plus + 0.5)
    return float(min(1.0, 2 * min(chance[: at + 1].sum(), chance[at:].sum())))
