"""The reference engine: one client at a time. Slow, readable, and what the others must agree with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coterie import tree
from coterie.batches import Batches
from coterie.tree import Tree


def loop(fn: Callable[..., Any], rows: tuple[Tree, ...], batches: Batches) -> Tree:
    """`fn(*row, batches of one client)` for every client, stacked again."""
    results = []
    for i in range(len(batches.count)):
        mine = Batches(batches.x, batches.y, *(leaf[i] for leaf in batches[2:]))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(global_seed(mine.key))
            results.append(fn(*(tree.rows(part, i) for part in rows), mine))
    return tree.stack(results)


def global_seed(key: Tensor) -> int:
    """Seeds PyTorch's own generator, for models that draw from it (dropout does not: it has keys of its own)."""
    return int(key.flatten()[0]) if key.numel() and not key.is_meta else 0
