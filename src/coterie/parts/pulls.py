"""Pulls to a model, (p / 2) ||theta - w||^2, that are as strong in a short round as in a long one.

K steps of size eta on the pull alone leave (1 - eta p)^K of the distance theta - w, about exp(-eta K p). With

    p = share / (eta K)                                                    (`pull_of_a_round`)

a round's pull takes back about that share of the way that a client goes, whatever the optimiser's step size and the
number of its steps are. A number for p is right for one schedule only: with 1, steps of 0.1 and 100 steps, a client
stays within a tenth of the way that it would go.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.core.batches import Batches
from coterie.core.errors import CoterieError
from coterie.core.optimizers import Optimizer

HELD_BACK = 0.1  # the share that `auto` asks for
MIN_PACE = 1e-6  # of a round: a schedule that comes to 0 takes no step, whatever pulls
Strength = Literal["auto"] | Annotated[float, Field(ge=0)]  # of a pull


def pull_of_a_round(optimizer: Optimizer, share: float, trained: Mapping[str, Tensor], batches: Batches) -> Tensor:
    """Return p = share / (eta K), a scalar. With a schedule, eta K is the sum of the sizes of the K steps.

    SGD has eta = lr / (1 - momentum). Adam moves every weight by about lr whatever the gradient is, that is
    eta = lr sqrt(d) for d weights and a gradient of norm 1, which is assumed.

    Args:
        optimizer: takes the steps; eta is its step size.
        share: the share of a client's way from w that is taken back in a round.
        trained: the trained parameters.
        batches: the client's minibatches, of which those that are not masked out are its K steps.
    """
    optimizer = getattr(optimizer, "at_full_pace", optimizer)
    lr: Any = getattr(optimizer, "lr", None)
    if lr is None:
        raise CoterieError(f"an automatic pull needs an optimiser with a step size `lr`, and {optimizer} has none")
    steady = optimizer.steady_step()
    eta = lr * math.sqrt(sum(value.numel() for value in trained.values())) if steady is None else steady
    return (share / eta) / batches.total_pace().clamp_min(1 if isinstance(batches.pace, tuple) else MIN_PACE)


def strength_of(asked: Strength, optimizer: Optimizer, trained: Mapping[str, Tensor], batches: Batches) -> Tensor:
    """Return the number that is asked for, or for `auto` the pull that takes back `HELD_BACK` of the way, a scalar."""
    if isinstance(asked, str):
        return pull_of_a_round(optimizer, HELD_BACK, trained, batches)
    return torch.as_tensor(asked, dtype=torch.get_default_dtype())
