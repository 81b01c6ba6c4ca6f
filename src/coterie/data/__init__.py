"""Data: federations, where they come from, and how they become minibatches."""

from coterie.data.federation import Federation, Split, from_clients
from coterie.data.loading import load
from coterie.data.pool import Pool, federate
from coterie.data.sources import SOURCES, Source

__all__ = ["SOURCES", "Federation", "Pool", "Source", "Split", "federate", "from_clients", "load"]
