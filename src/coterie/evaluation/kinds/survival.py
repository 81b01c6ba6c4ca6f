"""Metrics of times until an event.

- concordance: Harrell's C. Two examples can be compared if the event of one, i, happened first: t_i < t_j, or t_i = t_j
  and j was censored then. Of these pairs, it is the share in which i was at more risk by the model; equal risks count
  one half. It is NaN where no two examples can be compared. Pairs are of one client.
- the loss of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.targets import Cox, Survival, Target
from coterie.core.targets.survival import EVENT, TIME
from coterie.evaluation.bootstrap import Array, Mask, Statistic, Weights, product
from coterie.evaluation.predictions import Predictions

NAMES = ("concordance", "loss")
PAIRS_AT_ONCE = 2**22  # of which a matrix is made


def names(target: Target) -> tuple[str, ...]:
    """Return the metrics."""
    return NAMES


def default(target: Target) -> str:
    """Return the metric that selects rounds unless another one is asked for."""
    return "concordance"


def scorer(target: Target, y: Tensor, owner: Tensor, clients: int) -> Callable[[Tensor], dict[str, Tensor]]:
    """Return a function from outputs to every client's metrics, [clients]."""
    members = [(owner == i).nonzero().flatten().numpy() for i in range(clients)]
    times = y.numpy()
    compared = _compared(times, members) if sum(len(own) ** 2 for own in members) <= PAIRS_AT_ONCE else None

    def scores(outputs: Tensor) -> dict[str, Tensor]:
        risk = _risk(target, outputs).numpy()
        if compared is None:
            found = np.array([concordance(risk[own], times[own]) for own in members])
        else:
            found = compared.shares(risk)
        return {"concordance": torch.from_numpy(found)}

    return scores


class _Compared(NamedTuple):
    """All pairs of examples that can be compared, those of one client after those of another."""

    first: NDArray[np.int32]  # [pairs]; whose event happened first
    other: NDArray[np.int32]
    numbers: NDArray[np.int64]  # [clients], how many pairs each has

    def shares(self, risk: Array) -> Array:
        """Return each client's share of pairs in which the first was at more risk; NaN where there are none."""
        mine, others = risk[self.first], risk[self.other]
        agree = np.concatenate([[0.0], np.cumsum((mine > others) + 0.5 * (mine == others))])
        ends = np.cumsum(self.numbers)
        found: Array = np.full(len(ends), np.nan)
        np.divide(agree[ends] - agree[ends - self.numbers], self.numbers, out=found, where=self.numbers > 0)
        return found


def _compared(y: NDArray[Any], members: Sequence[NDArray[np.int64]]) -> _Compared:
    first, other, numbers = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)], []
    for own in members:
        rows, columns = np.nonzero(_comparable(y[own], np.flatnonzero(y[own, EVENT] > 0)))
        first.append(own[np.flatnonzero(y[own, EVENT] > 0)[rows]].astype(np.int32))
        other.append(own[columns].astype(np.int32))
        numbers.append(len(rows))
    return _Compared(np.concatenate(first), np.concatenate(other), np.array(numbers, dtype=np.int64))


def statistic(target: Target, metric: str, one: Predictions) -> Statistic:
    """Return a metric of one client as a function of weights."""
    risk, y = _risk(target, one.outputs).numpy(), one.y.numpy()
    kept = list(_pairs(risk, y)) if len(risk) ** 2 <= PAIRS_AT_ONCE else None

    def share(weights: Weights) -> Array:
        agree, all_of_them = np.zeros(len(weights)), np.zeros(len(weights))
        for first, better, comparable in kept or _pairs(risk, y):
            mine = np.ascontiguousarray(weights[:, first])
            agree += (product(mine, better) * weights).sum(1)
            all_of_them += (product(mine, comparable.astype(float)) * weights).sum(1)
        found: Array = np.full(len(weights), np.nan)
        np.divide(agree, all_of_them, out=found, where=all_of_them > 0)
        return found

    return share


def depends_on(target: Target, metric: str, one: Predictions) -> Tensor:
    """Return what a metric depends on, [examples, ...]."""
    return _risk(target, one.outputs)


def concordance(risk: Array, y: NDArray[Any]) -> float:
    """Return Harrell's C of one client; NaN if there is nothing to compare."""
    agree = number = 0.0
    for _, better, comparable in _pairs(risk, y):
        agree += float(better.sum())
        number += float(comparable.sum())
    return agree / number if number else float("nan")


def _pairs(risk: Array, y: NDArray[Any]) -> Iterator[tuple[NDArray[np.int64], Array, Mask]]:
    """Yield (i, [i, j] how far i and j agree: 1, 1/2 or 0, [i, j] whether they can be compared), some i at once."""
    first = np.flatnonzero(y[:, EVENT] > 0)
    step = max(1, PAIRS_AT_ONCE // max(len(y), 1))
    for start in range(0, len(first), step):
        i = first[start : start + step]
        comparable = _comparable(y, i)
        better = np.where(comparable, (risk[i, None] > risk) + 0.5 * (risk[i, None] == risk), 0.0)
        yield i, better, comparable


def _comparable(y: NDArray[Any], first: NDArray[np.int64]) -> Mask:
    """Return [first, examples]: whether the event of the one is known to have happened before that of the other."""
    time, event = y[:, TIME], y[:, EVENT] > 0
    comparable: Mask = (time[first, None] < time) | ((time[first, None] == time) & ~event)
    return comparable


def _risk(target: Target, outputs: Tensor) -> Tensor:
    assert isinstance(target, Survival | Cox)
    return target.risk(outputs)
