"""What is known of the methods at each site from examples that were held out: scores, and how sure differences are.

Every method predicted the same examples. Of any two methods, a site's difference has a standard error, by a paired
bootstrap over its examples. What a site knows of its own examples is the same wherever it is computed, and is all that
a choice needs. Real sites send these few numbers and no resamples: from many of those, and from the seed, single
examples' losses would follow.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from coterie.core.task import Task
from coterie.evaluation import Predictions, score
from coterie.evaluation.benefit import intervals, measure_each, sign_of
from coterie.evaluation.metrics import average

Array = NDArray[np.float64]
LOCAL = "local"
LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class Difference:
    """How much better one method is than another: the average over sites, positive is better."""

    mean: float
    low: float
    high: float
    error: float  # its standard error

    @property
    def clear(self) -> bool:
        """Whether chance does not explain it."""
        return self.low > 0


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What is known of some sites; every array has one entry, or row, for each.

    Attributes:
        sizes: the examples that were held out.
        scores: each method's metric, in the order of the panel.
        errors: of any two methods, by both names in the order of the panel: the difference's standard error.
        ends: the 95 % interval of each other method's gain over training alone, [sites, 2].
        differing: on how many examples each other method differs from training alone.
    """

    sizes: Array
    scores: dict[str, Array]
    errors: dict[tuple[str, str], Array]
    ends: dict[str, Array]
    differing: dict[str, Array]

    def error(self, one: str, other: str) -> Array:
        """Return the standard errors of the difference of two methods, in either order."""
        found = self.errors.get((one, other))
        return self.errors[other, one] if found is None else found


def evidence_of(
    task: Task, metric: str, found: Mapping[str, Predictions], names: Sequence[str], *, seed: int
) -> Evidence:
    """Return what held-out predictions say of each site.

    Args:
        task: the model and its loss.
        metric: what to choose by.
        found: every method's predictions, local's among them, in the order of the panel.
        names: the sites. A site's resamples depend only on the seed and its name.
        seed: of the bootstrap.
    """
    scores = {label: score(task, *each, len(names))[metric] for label, each in found.items()}
    rivals = {label: each for label, each in found.items() if label != LOCAL}
    sizes = np.bincount(found[LOCAL].owner.numpy(), minlength=len(names)).astype(float)
    if not rivals:
        return Evidence(sizes, scores, {}, {}, {})
    trials = measure_each(task, metric, rivals, found[LOCAL], names, seed=seed)
    gains = {label: each.samples for label, each in trials.items()} | {LOCAL: np.zeros(())}
    labels = list(found)
    errors = {
        (one, other): _spread(gains[one] - gains[other]) for k, one in enumerate(labels) for other in labels[k + 1 :]
    }
    ends = {label: np.array(intervals(each.samples)) for label, each in trials.items()}
    return Evidence(sizes, scores, errors, ends, {label: each.differing for label, each in trials.items()})


def joined(each: Sequence[Evidence]) -> Evidence:
    """Return what is known of all sites, from what is known of some."""
    first = each[0]
    return Evidence(
        np.concatenate([one.sizes for one in each]),
        {key: np.concatenate([one.scores[key] for one in each]) for key in first.scores},
        {key: np.concatenate([one.errors[key] for one in each]) for key in first.errors},
        {key: np.concatenate([one.ends[key] for one in each]) for key in first.ends},
        {key: np.concatenate([one.differing[key] for one in each]) for key in first.differing},
    )


def difference(
    metric: str, found: Evidence, one: str, other: str, *, together: int = 1, how: str | None = None
) -> Difference:
    """Return how much better one method is than another, with an interval that holds for so many of them together.

    Sites are independent, so the squared standard error of a mean over m sites is the mean of theirs, divided by m. An
    average that leaves out extremes leaves them out of both.

    Args:
        metric: what was compared.
        found: the sites.
        one: a method.
        other: the method that it is compared with.
        together: how many intervals are looked at: they are Bonferroni's.
        how: the average over sites (`coterie.evaluation.metrics.average`).
    """
    gains = sign_of(metric) * (found.scores[one] - found.scores[other])
    errors = found.error(one, other)
    known = ~np.isnan(gains) & ~np.isnan(errors)
    if not known.any():
        return Difference(average(gains, how), math.nan, math.nan, math.nan)
    gain = average(gains[known], how)
    error = math.sqrt(average(errors[known] ** 2, how) / int(known.sum()))
    reach = NormalDist().inv_cdf(1 - (1 - LEVEL) / together / 2) * error
    return Difference(gain, gain - reach, gain + reach, error)


def _spread(samples: Array) -> Array:
    """Return the standard deviation of each site's resamples; NaN if most of them are not defined."""
    there = ~np.isnan(samples)
    with np.errstate(invalid="ignore", divide="ignore"):
        number = there.sum(1)
        middle = np.where(there, samples, 0.0).sum(1) / number
        squares = np.where(there, (samples - middle[:, None]) ** 2, 0.0).sum(1) / (number - 1)
    spread: Array = np.where(2 * number >= samples.shape[1], np.sqrt(squares), np.nan)
    return spread
