"""Judges whether a client is better off than training alone, with an interval and a verdict.

A client's gain is its federated metric minus its local one, signed so that positive is better; both models have taken
the same number of gradient steps. Its interval is a paired bootstrap over the client's test examples: each resample
draws as many examples as there are, with replacement, and scores *both* models on the same ones. The interval ends are
percentiles of the differences. BCa is not used: its corrections (the skewness of a jackknife, the share of resamples
below the estimate) are unstable if the two models agree on most examples, as they often do, and undefined if they agree
on all.

The verdict follows from the interval: "gains" (above 0), "loses" (below 0) or "undecided". With fewer than six examples
on which the two models differ, no paired test can reach 5 % (all in favour: 2 * 2^-5 = 0.0625), but the percentiles of
so few would: such an interval is extended to 0, and the verdict is undecided. Where the models agree on all examples
the interval is [0, 0]; it says nothing about examples that were not seen.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.core import rng
from coterie.core.task import Task
from coterie.engine.engine import one_thread
from coterie.evaluation.bootstrap import draws
from coterie.evaluation.fairness import share_worse, spread
from coterie.evaluation.metrics import better, mean
from coterie.evaluation.predictions import Predictions
from coterie.evaluation.scoring import differing, score, statistic
from coterie.evaluation.significance import signed_rank

Array = NDArray[np.float64]
Label = TypeVar("Label", bound=Hashable)
FORMAT = 1  # of benefit.json
RESAMPLES = 2000
LEVEL = 0.95
BOUNDS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
UNDECIDED = "undecided"
VERDICTS = ("gains", "loses", UNDECIDED)
_FORMER_NAMES = {"cannot tell": UNDECIDED}  # in the folders of older runs


@dataclass(frozen=True)
class Benefit:
    """What clients gain over training alone, by one metric.

    Attributes:
        metric: The metric.
        clients: One row per client: client, test, federated, local, gain, low, high, verdict.
        overall: The mean gain with its interval, Wilcoxon's test, and how many clients have each verdict.
        fairness: How the metric is spread over clients, federated and local.
        resamples: The number of bootstrap resamples.
        level: The level of the intervals.
    """

    metric: str
    clients: list[dict[str, Any]]
    overall: dict[str, Any]
    fairness: dict[str, Any]
    resamples: int = RESAMPLES
    level: float = LEVEL

    def who(self, verdict: str) -> list[str]:
        """Return the names of the clients with a verdict: "gains", "loses" or "undecided"."""
        return [row["client"] for row in self.clients if row["verdict"] == verdict]

    def to_json(self) -> dict[str, Any]:
        """Return the content of benefit.json."""
        return {
            **{"format": FORMAT, "metric": self.metric, "level": self.level, "resamples": self.resamples},
            **{"clients": self.clients, "overall": self.overall, "fairness": self.fairness},
        }


@dataclass(frozen=True)
class Trial:
    """The comparison of each client's two models, for one seed."""

    sizes: Array  # [clients] test examples
    federated: Array  # [clients]
    local: Array  # [clients]
    samples: Array  # [clients, resamples]: gains
    differing: Array  # [clients]: test examples on which the two models differ


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
    """Compare two models per client for one seed.

    Args:
        task: The task, which defines the loss.
        metric: The metric to compare by.
        ours: The federated models' predictions.
        alone: Predictions of the models trained alone, on the same test examples.
        names: The clients' names. A client's resamples depend only on the seed and its name.
        seed: The seed.
        resamples: The number of bootstrap resamples.
    """
    return measure_each(task, metric, {"": ours}, alone, names, seed=seed, resamples=resamples)[""]


@one_thread()  # a client's examples are few: threads would wait for each other
def measure_each(
    task: Task,
    metric: str,
    several: Mapping[Label, Predictions],
    alone: Predictions,
    names: Sequence[str],
    *,
    seed: int,
    resamples: int = RESAMPLES,
) -> dict[Label, Trial]:
    """Do what `measure` does for several models of each client, by label.

    Resamples are drawn once, and models that say the same of a client's examples are scored on them once.
    """
    sizes = np.bincount(alone.owner.numpy(), minlength=len(names)).astype(float)
    samples = {label: np.empty((len(names), resamples)) for label in several}
    differ = {label: np.empty(len(names)) for label in several}
    for i, name in enumerate(names):
        one = alone.of(i)
        each = {label: ours.of(i) for label, ours in several.items()}
        models, which = _distinct([one, *each.values()])
        of = [statistic(task, metric, model) for model in models]
        start = 0
        for weights in draws(int(sizes[i]), resamples, rng.generator(seed, "bootstrap", name)):
            place, scored = slice(start, start + len(weights)), [of_model(weights) for of_model in of]
            for label, k in zip(several, which[1:], strict=True):
                samples[label][i, place] = scored[k] - scored[which[0]]
            start = place.stop
        for label, ours in each.items():
            differ[label][i] = differing(task, metric, ours, one)
    local = score(task, *alone, len(names))[metric]
    scores = {label: score(task, *ours, len(names))[metric] for label, ours in several.items()}
    sign = sign_of(metric)
    return {label: Trial(sizes, scores[label], local, sign * samples[label], differ[label]) for label in several}


def _distinct(each: Sequence[Predictions]) -> tuple[list[Predictions], list[int]]:
    """Return those of one client's predictions that differ, and for each of `each` the number of its equal."""
    models, which = list[Predictions](), list[int]()
    for one in each:
        alike = (k for k, model in enumerate(models) if one.outputs.dtype == model.outputs.dtype)
        same = (k for k in alike if torch.equal(one.outputs, models[k].outputs))
        which.append(next(same, len(models)))
        if which[-1] == len(models):
            models.append(one)
    return models, which


def judge(metric: str, names: Sequence[str], trials: Sequence[Trial], *, seed: int) -> Benefit:
    """Compute gains, intervals and verdicts from one trial per seed.

    With several seeds, a client's metrics and gain are means over seeds, and its interval is a two-level bootstrap.
    Each resample draws as many seeds as there are, with replacement, and for each of them one of its resamples of test
    examples, and averages their gains. So it reflects the variation of training as well as that of the test set.
    Examples on which the models differ are counted in the seed that has most of them, as the seeds' test sets overlap.

    The interval of the mean gain is for these clients on new test examples: in each resample it is the mean over
    clients. It does not say how other clients would fare; Wilcoxon's test over the clients' gains does.
    """
    federated = np.mean([trial.federated for trial in trials], axis=0)
    local = np.mean([trial.local for trial in trials], axis=0)
    sizes = np.mean([trial.sizes for trial in trials], axis=0)
    differ = np.max([trial.differing for trial in trials], axis=0)
    samples = _pooled([trial.samples for trial in trials], seed)
    ends, overall = np.array([interval(each) for each in samples]), interval(_means(samples))
    return benefit_of(metric, names, sizes, federated, local, ends, differ, overall, samples.shape[1])


def benefit_of(
    metric: str,
    names: Sequence[str],
    sizes: Array,
    federated: Array,
    local: Array,
    ends: Array,
    differ: Array,
    overall_ends: tuple[float, float],
    resamples: int = RESAMPLES,
) -> Benefit:
    """Return the gains and verdicts that follow from each client's metrics and the intervals of its gain.

    Args:
        metric: The metric.
        names: The clients' names.
        sizes: Their test examples.
        federated: Their federated models' metric.
        local: Their local models' metric.
        ends: The interval of each gain, [clients, 2].
        differ: The test examples on which a client's two models differ.
        overall_ends: The interval of the mean gain.
        resamples: The number of resamples behind the intervals.
    """
    gains = sign_of(metric) * (federated - local)
    rows = []
    for i, name in enumerate(names):
        low, high = ends[i].tolist() if not math.isnan(gains[i]) else (math.nan, math.nan)
        if differ[i] < min_differing(LEVEL):
            low, high = min(low, 0.0), max(high, 0.0)
        row = {"client": name, "test": round(sizes[i]), "federated": federated[i], "local": local[i], "gain": gains[i]}
        row |= {"low": low, "high": high}
        rows.append({key: _json_number(value) for key, value in row.items()} | {"verdict": verdict_of(low, high)})
    verdicts = [row["verdict"] for row in rows]
    low, high = overall_ends
    overall = {"mean_gain": mean(gains), "low": low, "high": high, "wilcoxon": signed_rank(gains)}
    overall |= {verdict: verdicts.count(verdict) for verdict in VERDICTS}
    both = {"federated": spread(federated, sizes, metric), "local": spread(local, sizes, metric)}
    return Benefit(metric, rows, overall, {**both, "share_worse_than_alone": share_worse(gains)}, resamples)


def sign_of(metric: str) -> int:
    """Return 1 if more is better, else -1."""
    return 1 if better(metric) is max else -1


def verdict_of(low: float, high: float) -> str:
    """Return the verdict on a gain with this interval; undecided where an end is NaN."""
    return "gains" if low > 0 else "loses" if high < 0 else UNDECIDED


def current_verdict(verdict: str) -> str:
    """Translate a verdict that an older version of Coterie wrote."""
    return _FORMER_NAMES.get(verdict, verdict)


def with_current_verdicts(benefit: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a benefit.json with the verdicts of an older version translated."""
    clients = [row | {"verdict": current_verdict(row["verdict"])} for row in benefit["clients"]]
    former = {name.replace(" ", "_"): name for name in _FORMER_NAMES}
    overall = {current_verdict(former.get(key, key)): value for key, value in benefit["overall"].items()}
    return benefit | {"clients": clients, "overall": overall}


def min_differing(level: float) -> int:
    """Return how many examples, all in favour of one model, a sign test needs to reach the level."""
    return math.ceil(1 - math.log2(1 - level))


def _pooled(samples: list[Array], seed: int) -> Array:
    """Pool one array [clients, resamples] per seed into one: see `judge`."""
    if len(samples) == 1:
        return samples[0]
    every = np.stack(samples)  # [seeds, clients, resamples]
    number, resamples = len(samples), every.shape[2]
    drawn = rng.generator(seed, "bootstrap of seeds").integers(number, size=(number, resamples))
    # A seed that is drawn twice contributes two different resamples.
    which = (np.arange(resamples) + (np.arange(number) * (resamples // number))[:, None]) % resamples
    pooled: Array = np.mean([every[drawn[k], :, which[k]] for k in range(number)], axis=0).T
    return pooled


def interval(samples: Array) -> tuple[float, float]:
    """Return percentiles of the resamples in which the metric is defined; NaN if that is fewer than half of them."""
    return intervals(samples[None])[0]


def intervals(samples: Array) -> list[tuple[float, float]]:
    """Return the `interval` of each row. Rows without NaN share one call, as a call costs more than its work."""
    whole = ~np.isnan(samples).any(1)
    found = np.full((len(samples), 2), np.nan)
    found[whole] = np.quantile(samples[whole], BOUNDS, axis=1).T
    for k in np.flatnonzero(~whole):
        there = samples[k][~np.isnan(samples[k])]
        if 2 * len(there) >= samples.shape[1]:
            found[k] = np.quantile(there, BOUNDS)
    return [(low, high) for low, high in found.tolist()]


def _means(samples: Array) -> Array:
    """Average over the clients for which each resample is defined, [resamples]."""
    there = ~np.isnan(samples)
    number = there.sum(0)
    means = np.full(samples.shape[1], np.nan)
    np.divide(np.where(there, samples, 0.0).sum(0), number, out=means, where=number > 0)
    return means


def _json_number(value: Any) -> Any:
    return value if isinstance(value, str | int) else math.nan if value != value else float(value)
