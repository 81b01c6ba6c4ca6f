"""Metrics of several targets: those of each, called `target.metric`, on the examples of which it is known; and the loss
of all together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.core.targets import Several, Target
from coterie.core.targets.several import Part
from coterie.evaluation.bootstrap import Statistic
from coterie.evaluation.kinds import classes, labels, numbers, ordered, survival
from coterie.evaluation.kinds.labels import on_some
from coterie.evaluation.predictions import Predictions

KINDS: dict[str, Any] = {
    **{"classification": classes, "regression": numbers, "multilabel": labels, "ordinal": ordered},
    **{"survival": survival, "cox": survival},
}


class Mine(NamedTuple):
    """What one of several targets is, and what is known of it."""

    part: Part
    outputs: Tensor  # of examples of which it is known
    y: Tensor
    known: Tensor  # [examples]


def names(target: Target) -> tuple[str, ...]:
    """Return the metrics."""
    assert isinstance(target, Several)
    each = [f"{part.name}.{name}" for part in target.parts for name in _names(part)]
    return (*each, "loss")


def default(target: Target) -> str:
    """Return the metric that selects rounds unless another one is asked for."""
    return "loss"


def scorer(target: Target, y: Tensor, owner: Tensor, clients: int) -> Callable[[Tensor], dict[str, Tensor]]:
    """Return a function from outputs to every client's metrics, [clients]."""
    assert isinstance(target, Several)
    nothing = torch.zeros(len(y), target.num_outputs)
    mine = [_mine(target, k, nothing, y) for k in range(len(target.parts))]
    each = [KINDS[one.part.target.kind].scorer(one.part.target, one.y, owner[one.known], clients) for one in mine]

    def scores(outputs: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for one, own, score in zip(mine, target.outputs_of(outputs), each, strict=True):
            scored = score(own[one.known])
            found |= {f"{one.part.name}.{name}": scored[name] for name in _names(one.part)}
        return found

    return scores


def statistic(target: Target, metric: str, one: Predictions) -> Statistic:
    """Return a metric of one client as a function of weights."""
    mine, name = _of_metric(target, metric, one)
    if not len(mine.y):
        return lambda weights: np.full(len(weights), np.nan)
    own = Predictions(mine.outputs, mine.y, one.owner[mine.known])
    found = on_some(KINDS[mine.part.target.kind].statistic(mine.part.target, name, own), mine.known)

    def quiet(weights: Any) -> Any:
        with np.errstate(invalid="ignore", divide="ignore"):  # in a resample without any example that is known
            return found(weights)

    return quiet


def depends_on(target: Target, metric: str, one: Predictions) -> Tensor:
    """Return what a metric depends on, [examples, ...]; where nothing is known, that is nothing."""
    mine, name = _of_metric(target, metric, one)
    own = Predictions(mine.outputs, mine.y, one.owner[mine.known])
    found = KINDS[mine.part.target.kind].depends_on(mine.part.target, name, own).double()
    whole = torch.zeros(len(one.y), *found.shape[1:], dtype=found.dtype)
    whole[mine.known] = found
    return whole


def _names(part: Part) -> tuple[str, ...]:
    known: tuple[str, ...] = KINDS[part.target.kind].names(part.target)
    return known[:-1]  # the loss of all together says more than each one's


def _mine(target: Several, k: int, outputs: Tensor, y: Tensor) -> Mine:
    part, columns = target.parts[k], target.columns_of(y)[k]
    known = part.known(columns)
    return Mine(part, target.outputs_of(outputs)[k][known], part.own(columns, known)[known], known)


def _of_metric(target: Target, metric: str, one: Predictions) -> tuple[Mine, str]:
    assert isinstance(target, Several)
    name, _, of = metric.rpartition(".")
    k = [part.name for part in target.parts].index(name)
    return _mine(target, k, one.outputs, one.y), of
