"""Where a round runs: one client at a time, stacked, and in worker processes."""

from coterie.engine.choose import Choice, choose, chunk_size
from coterie.engine.engine import Engine, in_order

__all__ = ["Choice", "Engine", "choose", "chunk_size", "in_order"]
