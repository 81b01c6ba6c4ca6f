"""Times until an event, some of which are only known to be longer than somebody was observed (right-censored).

`y` is [examples, 2]: the time observed, and 1 if the event happened then, or 0 if observation ended before it.

`Survival`, the default, divides time into the intervals (t_0, t_1], .., (t_(K-1), t_K], t_0 = 0, and models the hazard
of each, the chance that the event happens in it if it has not before:

    h_k = sigma(o_k),      S(t_k) = prod_(j <= k) (1 - h_j)
    loss = -sum_k ([t_k < t, or t_k <= t and censored] log(1 - h_k) + [t_(k-1) < t <= t_k and happened] log h_k)

An example is taken to have survived the intervals that ended before its own; an interval within which it was censored
does not count. Later than t_K, everybody has survived all intervals. `Cox` instead models a risk o relative to others:

    loss_i = [happened_i] (log sum_j w_j [t_j >= t_i] e^o_j - o_i)               (Breslow's, j in the same minibatch)

Why hazards are the default: their loss is one likelihood an example, whoever shares its minibatch. So it does not
change with the size of minibatches or of clients, single examples can be protected, weighed and compared, and the model
says how likely survival is, not only who is at more risk. Cox's comparisons stay within a minibatch of one client: the
gradient is one of a stratified partial likelihood with clients as strata, and poor if a minibatch has few events.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.targets.labels import log1mexp
from coterie.core.targets.target import Table, Target, number, refuse_missing, rows_of

INTERVALS = 10  # unless times are given
NOT_AT_RISK = -1e9  # instead of a logarithm of 0, whose gradient would be NaN
TIME, EVENT = 0, 1  # the columns of y
SURE = 1e-6  # no mean of models is surer than this that somebody survives an interval


@dataclass(frozen=True)
class _Times(Target):
    """What both kinds of target have in common."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (2,)

    def misfits(self, y: Tensor) -> tuple[Tensor, str]:
        time, event = y[:, TIME], y[:, EVENT]
        wrong = ~torch.isfinite(time) | (time < 0) | ~((event == 0) | (event == 1))
        return wrong, "a time that is not a number from 0, or an event that is not 0 or 1"

    def strata(self, y: NDArray[Any]) -> NDArray[Any] | None:
        return np.asarray(y[:, EVENT])

    def risk(self, outputs: Tensor) -> Tensor:
        """Return a number an example, [examples], that is larger the sooner the event is expected."""
        raise NotImplementedError


@dataclass(frozen=True)
class Survival(_Times):
    """Hazards of the intervals that end at `times`."""

    kind: ClassVar[str] = "survival"
    words: ClassVar[str] = "a survival task"
    outputs: ClassVar[str] = "logits of the hazards"

    times: tuple[float, ...]

    def __post_init__(self) -> None:
        increasing = all(a < b for a, b in zip((0.0, *self.times), self.times, strict=False))
        if not self.times or not increasing or not math.isfinite(self.times[-1]):
            raise refuse_missing(self.kind, f"horizons must be times above 0 that increase, not {self.times}")

    @property
    def num_outputs(self) -> int:
        return len(self.times)

    def losses(self, outputs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        time, happened = y[:, TIME], y[:, EVENT] > 0
        survived, died = [], []
        for start, end in zip((-math.inf, *self.times), self.times, strict=False):
            survived.append((time > end) | ((time >= end) & ~happened))
            died.append((time > start) & (time <= end) & happened)
        terms = torch.where(torch.stack(survived, 1), F.logsigmoid(-outputs), 0.0)
        terms = terms + torch.where(torch.stack(died, 1), F.logsigmoid(outputs), 0.0)
        return -terms.sum(1)

    def mix(self, outputs: Tensor, weight: Tensor) -> Tensor:
        alive = F.logsigmoid(-outputs).cumsum(-1)  # log S
        logarithm = torch.logsumexp(alive + weight.log().reshape(-1, *[1] * (alive.ndim - 1)), 0)
        each = torch.diff(logarithm, dim=1, prepend=torch.zeros_like(logarithm[:, :1]))  # log(1 - h)
        each = each.clamp_max(-SURE)
        return log1mexp(each) - each

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return S(t_k), [examples, times]."""
        return F.logsigmoid(-outputs).cumsum(1).exp()

    def risk(self, outputs: Tensor) -> Tensor:
        """Return how much of the time (0, t_K] is expected to be lost: the area above S, by the trapezoidal rule."""
        gone = -torch.expm1(F.logsigmoid(-outputs.double()).cumsum(1))  # 1 - S, exact where S is close to 1
        before = torch.cat([torch.zeros_like(gone[:, :1]), gone[:, :-1]], 1)
        width = torch.diff(torch.tensor((0.0, *self.times), dtype=torch.float64, device=gone.device))
        return ((before + gone) / 2) @ width

    def table(self, outputs: Tensor, classes: Sequence[str]) -> Table:
        found = torch.cat([self.risk(outputs)[:, None] / self.times[-1], self.predictions(outputs.double())], 1)
        return ["risk", *(f"survival_{number(time)}" for time in self.times)], rows_of(found)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Target:
        return cls(tuple(map(float, values["times"])))


@dataclass(frozen=True)
class Cox(_Times):
    """A relative risk, by Cox's partial likelihood within a minibatch."""

    kind: ClassVar[str] = "cox"
    words: ClassVar[str] = "a survival task by Cox's likelihood"
    outputs: ClassVar[str] = "logarithms of the risk"
    has_probabilities: ClassVar[bool] = False
    joint: ClassVar[bool] = True

    @property
    def num_outputs(self) -> int:
        return 1

    def losses(self, outputs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        risk, time, happened = outputs.reshape(-1), y[:, TIME], y[:, EVENT] > 0
        weight = torch.ones_like(risk) if weight is None else weight.to(risk.dtype)
        there = weight > 0
        weighted = torch.where(there, risk + torch.where(there, weight, 1.0).log(), NOT_AT_RISK)
        at_risk = time[None, :] >= time[:, None]  # [examples, those at risk]
        everyone = torch.logsumexp(torch.where(at_risk, weighted[None, :], NOT_AT_RISK), 1)
        return torch.where(happened & there, everyone - risk, 0.0)

    def mix(self, outputs: Tensor, weight: Tensor) -> Tensor:
        return (weight.reshape(-1, *[1] * (outputs.ndim - 1)) * outputs).sum(0)

    def risk(self, outputs: Tensor) -> Tensor:
        return outputs.reshape(-1).double()

    def table(self, outputs: Tensor, classes: Sequence[str]) -> Table:
        return ["log_risk"], rows_of(outputs.reshape(-1, 1))


def usual_times(y: NDArray[Any]) -> tuple[float, ...]:
    """Return the ends of intervals with about as many events each, rounded to three digits.

    Args:
        y: [examples, 2], whose times of events are divided.

    Raises:
        ConfigError: no event was observed.
    """
    events = y[(y[:, EVENT] == 1) & (y[:, TIME] > 0), TIME]
    if not len(events):
        raise refuse_missing(Survival.kind, "no event was observed, so that nothing can be learnt about its time")
    ends = np.quantile(events, np.arange(1, INTERVALS + 1) / INTERVALS)
    return tuple(dict.fromkeys(float(f"{end:.3g}") for end in ends))
