"""Data: what a federation is, where it comes from, and how it becomes minibatches."""

from coterie.data.federation import Federation, Split, from_clients
from coterie.data.sources import SOURCES, Source, load

__all__ = ["SOURCES", "Federation", "Source", "Split", "from_clients", "load"]
