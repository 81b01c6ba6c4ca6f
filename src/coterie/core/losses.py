"""Losses by name, for training with another one than the target's own.

Each is a frozen dataclass whose fields are its options, called with a model's outputs and the targets, that returns one
number an example. Two with the same options are equal, so that runs share compiled steps. With p the model's
probabilities, y the target, and e the difference of output and target:

    cross-entropy:smoothing=s     -(1 - s) log p_y - s mean_c log p_c
    focal:gamma=g                 -(1 - p_y)^g log p_y;   of several labels, the mean over those that are known
    squared-error                 e^2
    absolute-error                |e|
    huber:delta=d                 e^2 / 2 where |e| <= d, and else d (|e| - d / 2)
    pinball:q=q                   q e^+ + (1 - q) e^-,  where e^+ is how far the target is above the output, e^- below:
                                  the model predicts the quantile q
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from coterie.core.errors import ConfigError
from coterie.core.extensions import with_options
from coterie.core.options import parameters, with_given_options
from coterie.core.targets import Target
from coterie.core.targets.numbers import alike

ROUNDING = 1e-7  # below which 1 - p has no gradient, which would be infinite for gamma < 1
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy with smoothed labels."""

    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        return _mean(F.cross_entropy(outputs, y, reduction="none", label_smoothing=self.smoothing))


@dataclass(frozen=True)
class Focal:
    """The focal loss of Lin et al. (2017), which counts examples less that are predicted well."""

    gamma: Annotated[float, Field(ge=0)] = 2.0

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        logarithm = -F.cross_entropy(outputs, y, reduction="none")
        return _mean(-((-torch.expm1(logarithm)).clamp_min(ROUNDING) ** self.gamma) * logarithm)


@dataclass(frozen=True)
class FocalLabels:
    """The focal loss of labels that hold or not."""

    gamma: Annotated[float, Field(ge=0)] = 2.0

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        known = ~torch.isnan(y)
        logarithm = F.logsigmoid(torch.where(y == 1, outputs, -outputs))
        losses = -((-torch.expm1(logarithm)).clamp_min(ROUNDING) ** self.gamma) * logarithm
        return torch.where(known, losses, 0.0).mean(1)


@dataclass(frozen=True)
class SquaredError:
    """The squared error."""

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        return _mean((alike(outputs, y) - y) ** 2)


@dataclass(frozen=True)
class AbsoluteError:
    """The absolute error: the model predicts a median."""

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        return _mean((alike(outputs, y) - y).abs())


@dataclass(frozen=True)
class Huber:
    """Huber's loss, which outliers pull at with a bounded force."""

    delta: Annotated[float, Field(gt=0)] = 1.0

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        return _mean(F.huber_loss(alike(outputs, y), y.to(outputs.dtype), reduction="none", delta=self.delta))


@dataclass(frozen=True)
class Pinball:
    """The loss of a quantile."""

    q: Annotated[float, Field(gt=0, lt=1)] = 0.5

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        above = y - alike(outputs, y)
        return _mean(torch.maximum(self.q * above, (self.q - 1) * above))


LOSSES: dict[str, dict[str, type[Any]]] = {  # name -> kind of target -> the loss
    "cross-entropy": {"classification": CrossEntropy},
    "focal": {"classification": Focal, "multilabel": FocalLabels},
    "squared-error": {"regression": SquaredError},
    "absolute-error": {"regression": AbsoluteError},
    "huber": {"regression": Huber},
    "pinball": {"regression": Pinball},
}


@dataclass(frozen=True)
class WithOptions:
    """A user's function with some of its arguments given; equal to another one with the same."""

    function: Callable[..., Tensor]
    options: tuple[tuple[str, Any], ...]

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self.function(outputs, y, **dict(self.options))


def find_loss(text: str, target: Target) -> Loss:
    """Find a loss by `NAME[:option=value...]` or `package.module:function[:option=value...]`.

    Raises:
        ConfigError: there is no such loss or option, or it is for another kind of target.
    """
    found: Any
    found, words = with_options("loss", text, LOSSES)
    if isinstance(found, Mapping):
        if target.kind not in found:
            fits = ", ".join(name for name, kinds in LOSSES.items() if target.kind in kinds)
            has = f"there are {fits}" if fits else "it has only its own, or one of yours (package.module:function)"
            raise ConfigError([f"loss = '{text}': this is {target.words}; {has}"])
        made: Loss = _build(text, found[target.kind], words)
        return made
    if isinstance(found, type):
        own: Loss = _build(text, found, words)
        return own
    return _function(text, found, words)


def check_name(text: str) -> None:
    """Raise `ConfigError` unless there is a loss of this name; whether it suits the data is only known with them."""
    found: Any
    found, words = with_options("loss", text, LOSSES)
    if isinstance(found, Mapping):
        for loss in found.values():
            _build(text, loss, words)
    elif not isinstance(found, type):
        _function(text, found, words)


def _function(text: str, found: Any, words: Sequence[str]) -> Loss:
    """Return a user's function with the options after its name: its parameters beside outputs and targets."""
    if not callable(found):
        raise ConfigError([f"loss = '{text}': it is a {type(found).__name__}, not a function of outputs and targets"])
    bare: Loss = found
    if not words:
        return bare
    made: Any = with_given_options("loss", text, bare, words, tuple(parameters(bare))[:2])
    return WithOptions(bare, tuple(sorted(made.keywords.items())))


def _build(text: str, loss: type[Any], words: Sequence[str]) -> Any:
    made = with_given_options("loss", text, loss, words)
    try:
        return made()
    except (TypeError, ValueError) as error:
        raise ConfigError([f"loss '{text}': {error}"]) from error


def _mean(losses: Tensor) -> Tensor:
    """Return one loss an example, the mean over all that it has."""
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses
