"""Auxiliary modules: small networks beside the model, with parameters of their own.

A gate, a table of class embeddings, a projection of features: what a method trains together with the model and the user
did not write. Its parameters are trees of tensors like all others, under the method's own names, so that states,
messages, checkpoints and views hold them without another word. A method needs three things:

    initial values   `dense`, `embeddings`: in `init_server`, drawn from the run's seed and a name (`Population.seed`),
                     so that all clients are sent the same, and all copies of a server among peers begin equal
    functions        `affine`, `normalised`: pure functions of such a tree; write your own beside them
    steps            `coterie.core.training.minimise`: one optimiser for the model's parameters and these together

`head_inputs` is for methods that apply the model's head to features of their own making.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import rng
from coterie.core.errors import CoterieError
from coterie.core.method import Population
from coterie.core.task import Task
from coterie.core.tree import Params

EPS = 1e-5  # added to variances by a normalisation, as in PyTorch


class Dense(NamedTuple):
    """A fully connected layer and the normalisation of its outputs."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor  # [outputs]
    scale: Tensor  # [outputs]; of the normalisation
    shift: Tensor  # [outputs]


def dense(population: Population, name: str, inputs: int, outputs: int, params: Params, scale: float = 1.0) -> Dense:
    """Return a layer before the first round: weights and biases uniform within 1 / sqrt(inputs), as PyTorch draws them.

    Args:
        population: whose seed is used.
        name: tells this draw from others of the same run.
        inputs: how many.
        outputs: how many.
        params: the model, whose floating-point type and device the layer gets.
        scale: that of the normalisation; with 0, what is normalised begins at 0, whatever the inputs are.
    """
    draw = _generator(population, name)
    weight = (2 * torch.rand((outputs, inputs), generator=draw, device="cpu") - 1) / inputs**0.5
    bias = (2 * torch.rand((outputs,), generator=draw, device="cpu") - 1) / inputs**0.5
    own = (weight, bias, torch.full_like(bias, scale), torch.zeros_like(bias))
    return Dense(*(_like(each, params) for each in own))


def embeddings(population: Population, name: str, number: int, dim: int, params: Params) -> Tensor:
    """Return `number` vectors before the first round, [number, dim], each of whose values is drawn from N(0, 1)."""
    return _like(torch.randn((number, dim), generator=_generator(population, name), device="cpu"), params)


def affine(layer: Dense, x: Tensor) -> Tensor:
    """Return W x + b for `x` [..., inputs], [..., outputs]."""
    if x.ndim == 1:
        # How a product of a matrix and a vector rounds depends on where in memory the matrix begins, and that differs
        # between a run and the same one resumed from its files. These sums do not.
        return (layer.weight * x).sum(-1) + layer.bias
    return F.linear(x, layer.weight, layer.bias)


def normalised(layer: Dense, x: Tensor) -> Tensor:
    """Return `x` [..., outputs] with mean 0 and variance 1 over its last axis, scaled and shifted (layer norm)."""
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    return layer.scale * centred / (variance + EPS).sqrt() + layer.shift


def head_inputs(task: Task | None, owner: str) -> int:
    """Return the number of features that enter the model's head, for a method that applies the head itself.

    Args:
        task: the model.
        owner: the method's name, for the message.

    Raises:
        CoterieError: the model has no linear head, or something follows it.
    """
    if task is None or task.head_module is None:
        raise CoterieError(
            f"{owner} works on what enters the model's head, but this model has none: name one with --head"
        )
    if task.head_is_last is False:
        raise CoterieError(
            f"{owner} applies the model's head itself, so that '{task.head_module}' must be its last layer and linear, "
            "and it is not: name the last layer with --head, or choose another --model"
        )
    try:
        return task.feature_dim
    except ValueError as error:
        raise CoterieError(str(error)) from error


def _generator(population: Population, name: str) -> torch.Generator:
    return rng.torch_generator("auxiliary", population.seed, name)


def _like(value: Tensor, params: Params) -> Tensor:
    floating = next(each for each in params.values() if each.is_floating_point())
    return value.to(device=floating.device, dtype=floating.dtype)
