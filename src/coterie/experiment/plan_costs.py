"""What a run costs: bytes, minutes, memory.

bytes      those of one round's messages, which are made without training: all that counts is their shapes. Where
           they depend on what was learned (`Method.message_bytes`), those of two rounds of a probe
seconds    up to: the time of a client's step in the probe x steps of the run, again for training alone, and half a
           minute to choose an engine; from: the steps' time divided by what compiling and all cores usually save
memory     of the states of all clients and of the server
"""

from __future__ import annotations

import dataclasses

from coterie.compute.availability import unavailable
from coterie.compute.cpu import cores
from coterie.core import rng, tree
from coterie.core.method import Method, Population
from coterie.core.tree import Tree
from coterie.core.units import parse_bytes
from coterie.engine.peers import Peers
from coterie.experiment.probe import KEPT_BYTES, MAX_CLIENTS, Probe, make_probe
from coterie.experiment.setup import Setup
from coterie.storage.paged_rows import Store

FASTER = {True: 3, False: 8}  # what compiling may save of a step's time, with and without convolutions
STARTUP = 2.0  # seconds until the first round, at least
CHOOSING = 30.0  # seconds that measuring engines and compiling may take before it


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that all clients together send and receive."""

    up: int  # a round
    down: int
    total: int  # in all rounds
    exact: bool  # False: messages differ from client to client or from round to round, and only some were made


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of what a run keeps."""

    model: int
    clients: int
    server: int  # all copies of it, among peers
    data: int
    limit: int  # of the setting `memory`
    paged: bool  # clients' states are kept in files as far as they exceed it


def traffic_of(setup: Setup) -> Traffic | None:
    """Return the bytes of a run whose messages have one size; None if only training shows what is sent."""
    method, config, size = setup.method, setup.config, len(setup.federation.names)
    if type(method).message_bytes is not Method.message_bytes or type(method).offer is not Method.offer:
        return None
    participants = config.participants(size)
    model = tree.nbytes(setup.task.init())
    if size <= MAX_CLIENTS and size * model <= KEPT_BYTES:
        sim = make_probe(setup, size, 0)
        sim.participants = participants
        up, down = sim.traffic()
        return Traffic(up, down, config.rounds * (up + down), exact=participants == size or setup.peers is None)
    number = max(2, min(MAX_CLIENTS, KEPT_BYTES // model))
    (up, down), (up2, down2) = (make_probe(setup, each, 0).traffic() for each in (number, number // 2))
    same = up * (number // 2) == up2 * number and down * (number // 2) == down2 * number
    up, down = (_scaled(setup, each, number) for each in (up, down))
    if setup.peers is not None:
        down = 0
    return Traffic(up, down, config.rounds * (up + down), exact=same and setup.peers is None)


def _scaled(setup: Setup, nbytes: int, clients: int) -> int:
    """Return the bytes of a round, from those that `clients` send to a server."""
    size = len(setup.federation.names)
    copies = 1.0
    if isinstance(setup.peers, Peers):
        copies = sum(len(near) - 1 for near in setup.peers.near) / size
    return round(nbytes * copies * setup.config.participants(size) / clients)


def traffic_by_probe(setup: Setup, one: tuple[int, int], two: tuple[int, int], sim: Probe) -> Traffic:
    """Return the traffic of a run from that of two rounds of a probe."""
    everyone = len(sim.federation.names) == len(setup.federation.names)
    clients = len(sim.federation.names)
    if everyone:  # the probe has the run's topology
        share = setup.config.participants(clients) / clients
        first, later = ([round(value * share) for value in each] for each in (one, two))
    else:
        first, later = ([_scaled(setup, value, clients) for value in each] for each in (one, two))
        if setup.peers is not None:
            first[1] = later[1] = 0
    total = sum(first) + (setup.config.rounds - 1) * sum(later)
    return Traffic(up=later[0], down=later[1], total=total, exact=False)


def server_for(setup: Setup, size: int) -> Tree:
    params = setup.task.init()
    keys = rng.keys_of([f"client-{i}" for i in range(size)])
    return setup.method.init_server(params, Population(size, size, setup.task, keys))


def memory_of(setup: Setup) -> Memory:
    params, size = setup.task.init(), len(setup.federation.names)
    model = tree.nbytes(params)
    clients = size * tree.nbytes(setup.method.init_client(params))
    few = [min(size, number) for number in (4, 8, 12)] if size > 12 else [size]
    held = [tree.nbytes(server_for(setup, number)) for number in few]
    server = held[0] if len(few) == 1 else _parabola(few, held, size)
    if setup.peers is not None:
        server *= size
    limit = parse_bytes(setup.config.memory)
    data = setup.federation.x.nbytes + setup.federation.y.nbytes
    return Memory(model, clients, server, data, limit, Store(limit // 2, None).pages(clients))


def _parabola(at: list[int], values: list[int], where: int) -> int:
    """Return the value at `where` of the parabola through three points: a server has rows, and perhaps pairs."""
    (a, b, c), (x, y, z) = at, values
    slope, next_slope = (y - x) / (b - a), (z - y) / (c - b)
    return round(x + slope * (where - a) + (next_slope - slope) / (c - a) * (where - a) * (where - b))


def seconds_of(setup: Setup, training: float, evaluating: float) -> tuple[float, float]:
    """Return how long the run may take, from and to, if its clients' steps took `training` uncompiled on one core."""
    config = setup.config
    runs = 2 if config.reference and config.method != "local" else 1
    compiles = config.compile is not False and unavailable() is None
    saved = (FASTER[setup.task.convolves] if compiles else 1) * (config.workers or cores())
    settled = config.engine != "auto" and config.compile is False and config.workers is not None
    most = STARTUP + (0 if settled else CHOOSING) + runs * (training + evaluating)
    return STARTUP + runs * (training / saved + evaluating / 2), most
