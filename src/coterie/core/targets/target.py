"""What a model is to predict: one object for each kind of target.

A target says what an example's target looks like, how many outputs a model needs, what the loss of an example is, and
what outputs mean. Its metrics are in `coterie.evaluation.scoring`, by the same kinds. Everything here is a pure
function of tensors that can be stacked (`vmap`) and compiled, and targets with the same fields are equal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.errors import ConfigError

Table = tuple[list[str], list[list[str]]]  # a header, and rows


@dataclass(frozen=True)
class Target(ABC):
    """A kind of target. `y` is [examples, ...] everywhere, and `outputs` what a model gives, [examples, ...]."""

    kind: ClassVar[str]  # its name on the command line, in files and in messages
    words: ClassVar[str]  # "a regression"
    outputs: ClassVar[str]  # what a model's outputs are: "values"
    dtype: ClassVar[torch.dtype] = torch.float32  # of y
    has_probabilities: ClassVar[bool] = True  # rather than values
    joint: ClassVar[bool] = False  # whether the loss of an example depends on the others of its minibatch

    @property
    def num_classes(self) -> int | None:
        """The number of classes of which the outputs are logits; None if they are anything else."""
        return None

    @property
    def num_values(self) -> int | None:
        """How many values a target may have, 0, 1, ..., if it is one whole number; else None."""
        return self.num_classes

    @property
    @abstractmethod
    def num_outputs(self) -> int | None:
        """How many outputs a model needs; None if any number will do."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example's target."""
        return ()

    @abstractmethod
    def losses(self, outputs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return one loss an example, [examples].

        Args:
            outputs: the model's.
            y: the targets.
            weight: how much each example counts, [examples]. Only joint losses look at it.
        """

    @abstractmethod
    def mix(self, outputs: Tensor, weight: Tensor) -> Tensor:
        """Return outputs that predict the weighted mean of what several models predict.

        Args:
            outputs: of every model, [models, examples, ...].
            weight: of every model, [models]; their sum is 1.
        """

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return what a person would read, [examples, ...]: probabilities or, where there are none, values."""
        return outputs

    @abstractmethod
    def table(self, outputs: Tensor, classes: Sequence[str]) -> Table:
        """Return predictions as a table with a row an example; `classes` are the names of the data's classes."""

    def misfits(self, y: Tensor) -> tuple[Tensor, str]:
        """Return which targets cannot be, [examples], and what is wrong with them, in words."""
        return ~torch.isfinite(y.flatten(1) if y.ndim > 1 else y[:, None]).all(1), "a missing or infinite target"

    def strata(self, y: NDArray[Any]) -> NDArray[Any] | None:
        """Return a label for each example by which splits are stratified; None if there is nothing to go by."""
        return None

    def problem(self, outputs: Tensor) -> str | None:
        """Return why a model with such outputs does not suit the data, or None."""
        if self.num_outputs is None or (outputs.ndim >= 2 and outputs.shape[1] == self.num_outputs):
            return None
        return (
            f"the model gives outputs of shape {tuple(outputs.shape)}, but this is {self.words}: "
            f"its last layer needs {self.num_outputs} output{'s' * (self.num_outputs != 1)}"
        )

    def blank(self, number: int) -> Tensor:
        """Return so many targets that mean nothing, of the right shape and type."""
        return torch.zeros(number, *self.shape, dtype=self.dtype)

    def to_json(self) -> dict[str, Any]:
        """Return what `coterie.core.targets.from_json` makes the same target of."""
        return {"kind": self.kind, **asdict(self)}

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Target:
        """Make a target of its fields; this one has none."""
        return cls()


def number(value: float) -> str:
    """Write a number as tables show it."""
    return f"{value:.6g}"


def rows_of(values: Tensor) -> list[list[str]]:
    """Write a matrix of numbers as rows of a table."""
    return [[number(value) for value in row] for row in values.double().tolist()]


def patterns(y: NDArray[Any]) -> NDArray[np.int64]:
    """Number the different rows of a table of labels; a missing one is a value like any other."""
    _, which = np.unique(np.nan_to_num(y, nan=-1.0), axis=0, return_inverse=True)
    return which.reshape(-1).astype(np.int64)


def refuse_missing(kind: str, what: str) -> ConfigError:
    """Return the error for a target that lacks something."""
    return ConfigError([f"task = '{kind}': {what}"])
