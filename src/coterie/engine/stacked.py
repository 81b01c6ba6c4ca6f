"""The fast engine runs all clients of a chunk at once.

`vmap` turns one client's function into the chunk's, and `scan` inside it runs one lifted (and perhaps compiled) step
over all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.func import vmap

from coterie.core.batches import Batches
from coterie.core.tree import Tree

_POOL_IS_SHARED = Batches(None, None, 0, 0, 0, 0, 0, 0, 0)  # type: ignore[arg-type]


def stacked(fn: Callable[..., Any], rows: tuple[Tree, ...], batches: Batches) -> Tree:
    """Call `fn(*row, batches of one client)` for every client, as one vectorised call.

    Raises:
        RuntimeError: the model draws random numbers of its own (dropout does not: see `coterie.core.dropout`). They
            would differ between chunkings. `auto` then runs one client at a time.
    """
    return vmap(fn, in_dims=(*(0 for _ in rows), _POOL_IS_SHARED), randomness="error")(*rows, batches)
