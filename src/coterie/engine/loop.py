"""The reference engine runs one client at a time. It is slow and readable, and the others must agree with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.tree import Tree


def loop(fn: Callable[..., Any], rows: tuple[Tree, ...], batches: Batches) -> Tree:
    """Call `fn(*row, batches of one client)` for every client, and stack the results."""
    results = []
    for i in range(len(batches.count)):
        mine = Batches(batches.x, batches.y, *tree.rows(batches[2:], i))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(global_seed(mine.key))
            results.append(fn(*(tree.rows(part, i) for part in rows), mine))
    return tree.stack(results)


def global_seed(key: Tensor) -> int:
    """Return a seed of PyTorch's own generator, for models that draw from it (dropout does not: it has keys)."""
    return int(key.flatten()[0]) if key.numel() and not key.is_meta else 0
