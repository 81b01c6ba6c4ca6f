"""The fast engine: all clients of a chunk at once. `vmap` turns one client's function into the chunk's, and `scan`
inside it runs one lifted (and perhaps compiled) step over all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.func import vmap

from coterie.batches import Batches
from coterie.engine.loop import global_seed
from coterie.tree import Tree

_POOL_IS_SHARED = Batches(None, None, 0, 0, 0, 0)  # type: ignore[arg-type]


def stacked(fn: Callable[..., Any], rows: tuple[Tree, ...], batches: Batches) -> Tree:
    """`fn(*row, batches of one client)` for every client, as one vectorised call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(global_seed(batches.key))
        return vmap(fn, in_dims=(*(0 for _ in rows), _POOL_IS_SHARED), randomness="different")(*rows, batches)
