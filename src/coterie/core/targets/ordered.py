"""One of several levels in an order, such as mild, moderate, severe: a cumulative link with ordered thresholds.

Of K levels 0 .. K - 1, a model has the outputs o_1 .. o_(K-1), and with sigma(z) = 1 / (1 + e^-z)

    P(y >= k) = sigma(l_k),      l_1 = o_1,      l_k = l_(k-1) - softplus(o_k)

so that the probabilities fall with k whatever the outputs are: the thresholds are in order by construction. Outputs
o_2, ... that do not depend on the input are the thresholds' distances of a proportional odds model (McCullagh 1980;
CORAL has the same shared slope); a network may let them vary. Since 1 - e^-softplus(o) = sigma(o), the likelihood needs
no difference of probabilities:

    log P(y = k) = log sigma(l_k) + log sigma(-l_(k+1)) + log sigma(o_(k+1)),    0 < k < K - 1
    log P(y = 0) = log sigma(-l_1),      log P(y = K - 1) = log sigma(l_(K-1))

The predicted level is the median, the number of k with P(y >= k) > 1/2: none errs by fewer ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.targets.labels import mean_logit
from coterie.core.targets.target import Table, Target, refuse_missing, rows_of

LEAST_GAP = 1e-6  # between two neighbouring logits of a mean of models


@dataclass(frozen=True)
class Ordered(Target):
    """Levels 0, 1, ..., in their order."""

    kind: ClassVar[str] = "ordinal"
    words: ClassVar[str] = "a task with ordered levels"
    outputs: ClassVar[str] = "logits of the levels' steps"
    dtype: ClassVar[torch.dtype] = torch.int64

    levels: int

    def __post_init__(self) -> None:
        if self.levels < 2:
            raise refuse_missing(self.kind, "there are fewer than two levels")

    @property
    def num_values(self) -> int:
        return self.levels

    @property
    def num_outputs(self) -> int:
        return self.levels - 1

    def losses(self, outputs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        return -self.log_probabilities(outputs).gather(1, y[:, None])[:, 0]

    def log_probabilities(self, outputs: Tensor) -> Tensor:
        """Return log P(y = k), [examples, levels]."""
        l = cumulative(outputs)  # noqa: E741
        nothing = torch.zeros_like(l[:, :1])
        at_least = torch.cat([nothing, F.logsigmoid(l)], 1)
        below = torch.cat([F.logsigmoid(-l), nothing], 1)
        apart = torch.cat([nothing, F.logsigmoid(outputs[:, 1:]), nothing], 1)
        return at_least + below + apart

    def mix(self, outputs: Tensor, weight: Tensor) -> Tensor:
        l = mean_logit(cumulative(outputs), weight)  # noqa: E741
        gap = (l[:, :-1] - l[:, 1:]).clamp_min(LEAST_GAP)
        return torch.cat([l[:, :1], gap + torch.log(-torch.expm1(-gap))], 1)  # the inverse of softplus

    def predictions(self, outputs: Tensor) -> Tensor:
        return self.log_probabilities(outputs).exp()

    def predicted(self, outputs: Tensor) -> Tensor:
        """Return the predicted levels, [examples]."""
        return (cumulative(outputs) > 0).sum(1)

    def table(self, outputs: Tensor, classes: Sequence[str]) -> Table:
        p = rows_of(self.predictions(outputs.double()))
        names = [classes[k] for k in self.predicted(outputs).tolist()]
        return ["predicted", *classes], [[name, *row] for name, row in zip(names, p, strict=True)]

    def misfits(self, y: Tensor) -> tuple[Tensor, str]:
        return (y < 0) | (y >= self.levels), f"a level outside 0..{self.levels - 1}"

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Target:
        return cls(int(values["levels"]))

    def strata(self, y: NDArray[Any]) -> NDArray[Any] | None:
        return y


def cumulative(outputs: Tensor) -> Tensor:
    """Return l_1 .. l_(K-1), [..., K - 1], in falling order."""
    first, gaps = outputs[..., :1], F.softplus(outputs[..., 1:])
    return torch.cat([first, first - gaps.cumsum(-1)], -1)
