"""One of several classes: outputs are logits, the loss is -log p_y."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.targets.target import Table, Target, rows_of


@dataclass(frozen=True)
class Classes(Target):
    """An example has one class or, of a picture or a text, one for each of its places; classes are 0, 1, ..."""

    kind: ClassVar[str] = "classification"
    words: ClassVar[str] = "a classification"
    outputs: ClassVar[str] = "logits"
    dtype: ClassVar[torch.dtype] = torch.int64

    number: int | None = None  # None: as many as the model has outputs
    each: tuple[int, ...] = ()  # the shape of one example's labels

    @property
    def num_classes(self) -> int | None:
        return self.number

    @property
    def num_outputs(self) -> int | None:
        return self.number

    @property
    def shape(self) -> tuple[int, ...]:
        return self.each

    def losses(self, outputs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        losses = F.cross_entropy(outputs, y, reduction="none")
        return losses.flatten(1).mean(1) if losses.ndim > 1 else losses

    def mix(self, outputs: Tensor, weight: Tensor) -> Tensor:
        logarithm = weight.log().reshape(-1, *[1] * (outputs.ndim - 1))
        return torch.logsumexp(F.log_softmax(outputs, 2) + logarithm, 0)

    def predictions(self, outputs: Tensor) -> Tensor:
        return torch.softmax(outputs, 1)

    def table(self, outputs: Tensor, classes: Sequence[str]) -> Table:
        p = outputs.double().softmax(1)
        found = [classes[k] for k in outputs.argmax(1).tolist()]
        return ["predicted", *classes], [[name, *row] for name, row in zip(found, rows_of(p), strict=True)]

    def misfits(self, y: Tensor) -> tuple[Tensor, str]:
        last = int(y.max()) if self.number is None else self.number - 1
        bad = (y < 0) | (y > last)
        return bad.flatten(1).any(1) if bad.ndim > 1 else bad, f"a label outside 0..{last}"

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Target:
        number = values["number"]
        return cls(None if number is None else int(number), tuple(map(int, values["each"])))

    def strata(self, y: NDArray[Any]) -> NDArray[Any] | None:
        return y

    def problem(self, outputs: Tensor) -> str | None:
        if outputs.ndim >= 2 and (self.number is None or outputs.shape[1] >= self.number):
            return None
        return (
            f"the model gives outputs of shape {tuple(outputs.shape)}, but the data has {self.number} classes: "
            f"its last layer needs {self.number} outputs"
        )
