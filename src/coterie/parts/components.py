"""Several models that everybody is sent: how they begin, and how one is chosen of them. Leaves are [K, ...]."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.core import rng, tree
from coterie.core.tree import Params


def different_models(params: Params, number: int) -> Params:
    """Return `number` models to begin with, leaves [number, ...]; the first is `params`.

    Models that begin equal would stay equal. In each of the others, the values of every tensor are those of `params` in
    another, random order, so that a layer whose weights were drawn independently begins as if they were drawn again.
    Constant tensors, such as those of normalisation layers, stay as they are. All servers draw the same.
    """

    def shuffled(leaf: Tensor, seed: int) -> Tensor:
        order = torch.randperm(leaf.numel(), generator=rng.torch_generator("different models", seed)).to(leaf.device)
        return leaf.flatten()[order].reshape(leaf.shape)

    def model(k: int) -> Params:
        return {name: shuffled(value, place + len(params) * k) for place, (name, value) in enumerate(params.items())}

    return tree.stack([params, *(model(k) for k in range(1, number))])


def chosen(models: Params, which: Tensor) -> Params:
    """Return the model number `which` [] of `models`; it works under `vmap`."""
    return tree.map(lambda leaf: leaf.index_select(0, which.reshape(1))[0], models)
