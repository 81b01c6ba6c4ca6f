"""Is it better for a client than training alone? With an interval, and in words.

A client's gain is its federated metric less its local one, signed so that positive is better, both models having taken
the same number of gradient steps. Its interval is a paired bootstrap over the client's test examples: each resample
draws as many as there are, with replacement, and scores *both* models on the same ones; low and high are percentiles
of the differences. Percentile and not BCa, because where the two models agree on most examples, as they often do, BCa's
corrections (a jackknife's skewness, the share of resamples below the estimate) are quotients of almost nothing, and
where they agree on all of them they do not exist.

What an interval says is "gains" (above 0), "loses" (below 0) or "cannot tell". With fewer than six examples on which
the two models differ, no paired test can reach 5 % (all in favour: 2 * 2^-5 = 0.0625), but the percentiles of so few
would: such an interval is extended to 0, and the client cannot tell. Where the models agree on all examples the
interval is [0, 0]; it says nothing of examples that were not seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie import rng
from coterie.evaluation.bootstrap import differing, draws, statistic
from coterie.evaluation.fairness import share_worse, spread
from coterie.evaluation.metrics import BETTER, mean, score
from coterie.evaluation.predictions import Predictions
from coterie.evaluation.significance import signed_rank
from coterie.task import Task

Array = NDArray[np.float64]
FORMAT = 1  # of benefit.json
RESAMPLES = 2000
LEVEL = 0.95
BOUNDS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
VERDICTS = ("gains", "loses", "cannot tell")


@dataclass(frozen=True)
class Benefit:
    """`clients` are plain rows: client, test, federated, local, gain, low, high, verdict."""

    metric: str
    clients: list[dict[str, Any]]
    overall: dict[str, Any]
    fairness: dict[str, Any]
    resamples: int = RESAMPLES
    level: float = LEVEL

    def who(self, verdict: str) -> list[str]:
        """The names of those that "gains", "loses" or "cannot tell"."""
        return [row["client"] for row in self.clients if row["verdict"] == verdict]

    def to_json(self) -> dict[str, Any]:
        """What benefit.json holds."""
        return {
            **{"format": FORMAT, "metric": self.metric, "level": self.level, "resamples": self.resamples},
            **{"clients": self.clients, "overall": self.overall, "fairness": self.fairness},
        }


@dataclass(frozen=True)
class Trial:
    """One seed's comparison of two models a client."""

    sizes: Array  # [clients] test examples
    federated: Array  # [clients]
    local: Array  # [clients]
    samples: Array  # [clients, resamples]: the gain in each resample
    differing: Array  # [clients]: test examples that tell the two models apart


def measure(
    task: Task,
    metric: str,
    ours: Predictions,
    alone: Predictions,
    names: Sequence[str],
    *,
    seed: int,
    resamples: int = RESAMPLES,
) -> Trial:
    """Both predictions are of the same test examples. A client's resamples depend on the seed and its name only."""
    sizes = np.bincount(ours.owner.numpy(), minlength=len(names)).astype(float)
    federated, local = (score(task, *each, len(names))[metric] for each in (ours, alone))
    samples, apart = np.empty((len(names), resamples)), np.empty(len(names))
    for i, name in enumerate(names):
        pair = ours.of(i), alone.of(i)
        of_ours, of_alone = (statistic(task, metric, each) for each in pair)
        weights = draws(int(sizes[i]), resamples, rng.generator(seed, "bootstrap", name))
        samples[i] = np.concatenate([of_ours(some) - of_alone(some) for some in weights])
        apart[i] = differing(metric, *pair, regression=task.kind == "regression")
    return Trial(sizes, federated, local, sign_of(metric) * samples, apart)


def judge(metric: str, names: Sequence[str], trials: Sequence[Trial], *, seed: int) -> Benefit:
    """One benefit from one trial a seed.

    With several, a client's metrics and gain are means over seeds. Its interval is a bootstrap of two levels: a
    resample draws as many seeds as there are, with replacement, and for each one of its resamples of test examples, and
    takes the mean of their gains; so it holds the variation of training as well as that of the test set. Examples that
    tell the models apart are counted in the seed that has most of them, as the seeds' test sets overlap.

    The interval of the mean gain is of these clients on new test examples: in each resample, the mean over clients. How
    far other clients would differ is not in it; Wilcoxon's test over the clients' gains speaks to that.
    """
    federated = np.mean([trial.federated for trial in trials], axis=0)
    local = np.mean([trial.local for trial in trials], axis=0)
    sizes = np.mean([trial.sizes for trial in trials], axis=0)
    apart = np.max([trial.differing for trial in trials], axis=0)
    gains = sign_of(metric) * (federated - local)
    samples = _pooled([trial.samples for trial in trials], seed)
    rows = []
    for i, name in enumerate(names):
        low, high = interval(samples[i]) if not math.isnan(gains[i]) else (math.nan, math.nan)
        if apart[i] < fewest(LEVEL):
            low, high = min(low, 0.0), max(high, 0.0)
        row = {"client": name, "test": round(sizes[i]), "federated": federated[i], "local": local[i], "gain": gains[i]}
        row |= {"low": low, "high": high}
        rows.append({key: _plain(value) for key, value in row.items()} | {"verdict": verdict_of(low, high)})
    verdicts = [row["verdict"] for row in rows]
    low, high = interval(_means(samples))
    overall = {"mean_gain": mean(gains), "low": low, "high": high, "wilcoxon": signed_rank(gains)}
    overall |= {verdict.replace(" ", "_"): verdicts.count(verdict) for verdict in VERDICTS}
    both = {"federated": spread(federated, sizes, metric), "local": spread(local, sizes, metric)}
    return Benefit(metric, rows, overall, {**both, "share_worse_than_alone": share_worse(gains)}, samples.shape[1])


def sign_of(metric: str) -> int:
    return 1 if BETTER[metric] is max else -1


def verdict_of(low: float, high: float) -> str:
    return "gains" if low > 0 else "loses" if high < 0 else "cannot tell"


def fewest(level: float) -> int:
    """The least number of examples on which, all in favour of one model, a sign test reaches the level."""
    return math.ceil(1 - math.log2(1 - level))


def _pooled(samples: list[Array], seed: int) -> Array:
    """[clients, resamples] from one such array a seed: see `judge`."""
    if len(samples) == 1:
        return samples[0]
    every = np.stack(samples)  # [seeds, clients, resamples]
    number, resamples = len(samples), every.shape[2]
    drawn = rng.generator(seed, "bootstrap of seeds").integers(number, size=(number, resamples))
    # A seed that is drawn twice gives two different resamples.
    which = (np.arange(resamples) + (np.arange(number) * (resamples // number))[:, None]) % resamples
    pooled: Array = np.mean([every[drawn[k], :, which[k]] for k in range(number)], axis=0).T
    return pooled


def interval(samples: Array) -> tuple[float, float]:
    """Percentiles of the resamples in which the metric is defined; NaN if that is fewer than half of them."""
    return intervals(samples[None])[0]


def intervals(samples: Array) -> list[tuple[float, float]]:
    """`interval` of each row: those that are defined throughout by one call, which costs more than its work."""
    whole = ~np.isnan(samples).any(1)
    found = np.full((len(samples), 2), np.nan)
    found[whole] = np.quantile(samples[whole], BOUNDS, axis=1).T
    for k in np.flatnonzero(~whole):
        there = samples[k][~np.isnan(samples[k])]
        if 2 * len(there) >= samples.shape[1]:
            found[k] = np.quantile(there, BOUNDS)
    return [(low, high) for low, high in found.tolist()]


def _means(samples: Array) -> Array:
    """[resamples]: over the clients for which each is defined."""
    there = ~np.isnan(samples)
    number = there.sum(0)
    means = np.full(samples.shape[1], np.nan)
    np.divide(np.where(there, samples, 0.0).sum(0), number, out=means, where=number > 0)
    return means


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int) else math.nan if value != value else float(value)
