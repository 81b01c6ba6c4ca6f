"""Reads a `torch.utils.data.Dataset` into tensors once, so that training never waits for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from coterie.core.errors import DataError


def gather(client: str, dataset: Dataset[Any]) -> tuple[Tensor, Tensor]:
    """Read a map-style dataset of (x, y) pairs into two tensors.

    A `TensorDataset`, or a `Subset` of one, is not copied item by item; of any other dataset every item is read once.

    Args:
        client: The name of the client, for error messages.
        dataset: The dataset.

    Raises:
        DataError: The dataset has no length or no items, or its items are not pairs that stack to tensors.
    """
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return dataset.tensors[0], dataset.tensors[1]
    if isinstance(dataset, Subset) and isinstance(dataset.dataset, TensorDataset | Subset):
        x, y = gather(client, dataset.dataset)
        own = torch.as_tensor(dataset.indices, dtype=torch.int64)
        return x[own], y[own]
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(f"client '{client}': a dataset without a length cannot be split; use one with __len__")
    size = len(dataset)
    if not size:
        raise DataError(f"client '{client}' has no examples")
    at_once = getattr(dataset, "__getitems__", None)
    items = at_once(list(range(size))) if callable(at_once) else [dataset[i] for i in range(size)]
    if not isinstance(items[0], tuple | list) or len(items[0]) != 2:
        raise DataError(f"client '{client}': each item of its dataset must be a pair (x, y)")
    try:
        x, y = default_collate(list(items))
    except (RuntimeError, TypeError) as error:
        raise DataError(f"client '{client}': the items of its dataset do not make one tensor: {error}") from error
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        raise DataError(f"client '{client}': each item of its dataset must be a pair of tensors or numbers")
    return x, y
