"""Several models that everybody is sent: how they begin, and how one is chosen of them. Leaves are [K, ...]."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.core import rng, tree
from coterie.core.task import Task
from coterie.core.tree import Params


def different_models(params: Params, number: int, task: Task | None) -> Params:
    """Return `number` models to begin with, leaves [number, ...]; the first is `params`.

    Models that begin equal would stay equal. In each of the others, the values of every trained tensor are those of
    `params` in another, random order, so that a layer whose weights were drawn independently begins as if they were
    drawn again. This holds for pretrained weights, too, if they are trained: all models but the first lose what those
    knew. Frozen parameters and buffers stay as they are, and so do constant tensors, such as those of normalisation
    layers. All servers draw the same.

    Args:
        params: the initial model, buffers included.
        number: how many models to return.
        task: says what is trained; None: everything.
    """
    names = params.keys() if task is None else task.trainable

    def shuffled(leaf: Tensor, seed: int) -> Tensor:
        order = torch.randperm(leaf.numel(), generator=rng.torch_generator("different models", seed)).to(leaf.device)
        return leaf.flatten()[order].reshape(leaf.shape)

    def model(k: int) -> Params:
        return {
            name: shuffled(value, place + len(params) * k) if name in names else value
            for place, (name, value) in enumerate(params.items())
        }

    return tree.stack([params, *(model(k) for k in range(1, number))])


def chosen(models: Params, which: Tensor) -> Params:
    """Return the model number `which` [] of `models`; it works under `vmap`."""
    return tree.map(lambda leaf: leaf.index_select(0, which.reshape(1))[0], models)
