"""Where a round runs: one client at a time, stacked, in worker processes; around a server or from peer to peer."""

from coterie.engine.central import Central, Place
from coterie.engine.choose import Choice, choose, chunk_size, shape
from coterie.engine.engine import Engine, in_order
from coterie.engine.peers import Peers, make_peers

__all__ = ["Central", "Choice", "Engine", "Peers", "Place", "choose", "chunk_size", "in_order", "make_peers", "shape"]
