"""Run the clients of a round (one at a time, stacked, in workers) and combine what they send (a server, or peers)."""

from coterie.engine.autotune import Choice, Probe, choose, chunk_size, shape
from coterie.engine.central import Central, Place
from coterie.engine.engine import ClientRunner, Engine, Rows, in_order
from coterie.engine.peers import Peers, make_peers

__all__ = [
    "Central",
    "Choice",
    "ClientRunner",
    "Engine",
    "Peers",
    "Place",
    "Probe",
    "Rows",
    "choose",
    "chunk_size",
    "in_order",
    "make_peers",
    "shape",
]
