"""Several labels an example, each of which holds or not, such as a patient's complications.

With l_1 .. l_L the outputs and y_k in {0, 1}, where missing ones are NaN and left out,

    p_k = sigmoid(l_k),      loss = (1 / L) sum_k [y_k is known] (-y_k log p_k - (1 - y_k) log(1 - p_k))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.targets.target import Table, Target, patterns, refuse_missing, rows_of


@dataclass(frozen=True)
class Labels(Target):
    """Labels by name; `y` is [examples, labels] of 0, 1 and NaN for a label that nobody recorded."""

    kind: ClassVar[str] = "multilabel"
    words: ClassVar[str] = "a task with several labels"
    outputs: ClassVar[str] = "logits of the labels"

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) < len(self.names):
            raise refuse_missing(self.kind, "its labels need different names, and at least one")

    @property
    def num_outputs(self) -> int:
        return len(self.names)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.names),)

    def losses(self, outputs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        known = ~torch.isnan(y)
        truth = torch.where(known, y, 0.0).to(outputs.dtype)
        each = F.binary_cross_entropy_with_logits(outputs, truth, reduction="none")
        return torch.where(known, each, 0.0).mean(1)

    def mix(self, outputs: Tensor, weight: Tensor) -> Tensor:
        return mean_logit(outputs, weight)

    def predictions(self, outputs: Tensor) -> Tensor:
        return torch.sigmoid(outputs)

    def table(self, outputs: Tensor, classes: Sequence[str]) -> Table:
        return list(self.names), rows_of(self.predictions(outputs.double()))

    def misfits(self, y: Tensor) -> tuple[Tensor, str]:
        wrong = ~(torch.isnan(y) | (y == 0) | (y == 1))
        return wrong.any(1) | torch.isnan(y).all(1), "a label that is not 0 or 1, or none that is known"

    def strata(self, y: NDArray[Any]) -> NDArray[Any] | None:
        return patterns(y)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Target:
        return cls(tuple(map(str, values["names"])))


def mean_logit(logits: Tensor, weight: Tensor) -> Tensor:
    """Return the logit of the weighted mean of probabilities; logits [models, ...], weight [models]."""
    logarithm = weight.log().reshape(-1, *[1] * (logits.ndim - 1))
    holds = torch.logsumexp(F.logsigmoid(logits) + logarithm, 0)
    return holds - torch.logsumexp(F.logsigmoid(-logits) + logarithm, 0)


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - e^x) for x < 0, exactly on both sides of -log 2."""
    near = torch.log(-torch.expm1(x.clamp_min(-math.log(2))))
    return torch.where(x > -math.log(2), near, torch.log1p(-torch.exp(x.clamp_max(-math.log(2)))))
