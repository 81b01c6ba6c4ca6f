"""Wilcoxon's signed-rank test over clients, as in FedAMP's paper, and its effect size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

EXACT = 50  # differences for which every sign pattern is counted


def signed_rank(differences: NDArray[np.float64]) -> dict[str, Any]:
    """Two-sided; the differences are paired, one a client. Zero and undefined ones are left out; `n` is what remains.

    statistic  min(W+, W-), sums of the ranks of |d| over positive and negative d
    p          up to 50 differences exact, by counting sign patterns, ties included (scipy's exact test has none);
               beyond, scipy's normal approximation. Below 2^(1 - n) it cannot fall: five clients never reach 0.05
    effect     the matched-pairs rank-biserial correlation (W+ - W-) / (W+ + W-): 1 if all gain, -1 if all lose
    With nothing but zeros there is no evidence either way: p = 1 and effect = 0.
    """
    there = np.round(differences[~np.isnan(differences)], 12)  # 0.3 - 0.2 and 0.1 are a tie
    there = there[there != 0]
    number = len(there)
    if not number:
        return {"statistic": 0.0, "p": 1.0, "effect": 0.0, "n": 0}
    ranks = stats.rankdata(np.abs(there))
    plus = float(ranks[there > 0].sum())
    minus = float(ranks[there < 0].sum())
    p = _exact(ranks, plus) if number <= EXACT else float(stats.wilcoxon(there, method="approx").pvalue)
    return {"statistic": min(plus, minus), "p": p, "effect": (plus - minus) / (plus + minus), "n": number}


def _exact(ranks: NDArray[np.float64], plus: float) -> float:
    """2 min(P(W+ <= w), P(W+ >= w)) where each rank has either sign with probability 1/2; at most 1."""
    steps = np.rint(2 * ranks).astype(int)  # ties share half ranks: twice them are whole
    chance = np.zeros(steps.sum() + 1)
    chance[0] = 1.0
    for step in steps:
        chance[step:] = (chance[step:] + chance[:-step]) / 2
        chance[:step] /= 2
    at = math.floor(2 * plus + 0.5)
    return float(min(1.0, 2 * min(chance[: at + 1].sum(), chance[at:].sum())))
