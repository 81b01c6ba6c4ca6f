"""Numbers: outputs are the predicted values, the loss is the squared error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from coterie.core.targets.target import Table, Target, rows_of


@dataclass(frozen=True)
class Numbers(Target):
    """An example has one number, or several of a shape."""

    kind: ClassVar[str] = "regression"
    words: ClassVar[str] = "a regression"
    outputs: ClassVar[str] = "values"
    has_probabilities: ClassVar[bool] = False

    each: tuple[int, ...] | None = None  # the shape of one example's numbers; None: that of the model's outputs

    @property
    def num_outputs(self) -> int | None:
        return None if self.each is None else math.prod(self.each)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.each or ()

    def losses(self, outputs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        out = alike(outputs, y)
        losses = (out - y.to(out.dtype)) ** 2
        return losses.flatten(1).mean(1) if losses.ndim > 1 else losses

    def mix(self, outputs: Tensor, weight: Tensor) -> Tensor:
        return (weight.reshape(-1, *[1] * (outputs.ndim - 1)) * outputs).sum(0)

    def table(self, outputs: Tensor, classes: Sequence[str]) -> Table:
        flat = outputs.reshape(len(outputs), -1)
        header = ["predicted"] if flat.shape[1] == 1 else [f"predicted{i + 1}" for i in range(flat.shape[1])]
        return header, rows_of(flat)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Target:
        each = values["each"]
        return cls(None if each is None else tuple(map(int, each)))

    def problem(self, outputs: Tensor) -> str | None:
        return None  # outputs may have any shape that the targets have; the loss compares them


def alike(outputs: Tensor, y: Tensor) -> Tensor:
    """Return outputs in the shape of the targets: a last axis of one number is dropped.

    Raises:
        ValueError: the shapes differ otherwise.
    """
    if outputs.ndim == y.ndim + 1 and outputs.shape[-1] == 1:
        outputs = outputs.squeeze(-1)
    if outputs.shape != y.shape:
        raise ValueError(f"the model's outputs {tuple(outputs.shape)} do not match the targets {tuple(y.shape)}")
    return outputs
