"""Say before a run what it will do, and what in it can do nothing.

Most of it is measured: a few clients work through two real rounds, uncompiled and with a limited number of steps
(`probe.py`). What is said of the whole run is computed from that:

    bytes      of one round's messages, whose shapes are those of the run
    minutes    time of a client's step in the probe x steps of the run, and as much again for training alone;
               from that divided by what compiling and all cores usually save, up to that
    memory     of the states of all clients and of the server

A first look (`first_look`), for the first lines of a run, takes four steps instead.
"""

from __future__ import annotations

import dataclasses
import time
import warnings as python_warnings
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.compute.availability import unavailable
from coterie.compute.cpu import cores
from coterie.core import rng, tree
from coterie.core.errors import CoterieError, CoterieWarning
from coterie.core.method import Method, Population
from coterie.core.tree import Tree
from coterie.data import Federation
from coterie.engine import Engine
from coterie.engine.peers import Peers
from coterie.experiment.config import parse_bytes
from coterie.experiment.probe import Probe, Pull, progress_of, pull_of
from coterie.experiment.setup import Data, Model, Setup, prepare
from coterie.methods.fields import AnyMethod
from coterie.storage.paged_rows import Store
from coterie.storage.state import State

INERT = 1e-3  # a pull of this share of the data's gradient does nothing that can be seen
HELD = 0.15  # a model that moves this share of the way that training alone takes it is held where it is
BINDS = 0.5  # by a pull that leaves no more than this of a model's movement
CERTAIN = 0.999  # a weight that leaves nothing for others
ALIKE = 0.01  # weights that differ by this share of their mean are equal
FASTER = {True: 3, False: 8}  # what compiling may save of a step's time, with and without convolutions
STARTUP = 2.0  # seconds until the first round, at least
MAX_SAMPLED = 200_000  # clients times rounds for which participation is worked out
MAX_EXACT = 32  # clients; of more, messages and states are extrapolated
KEPT_BYTES = 2**28  # of models that the probe may hold


class Size(NamedTuple):
    """Limits of a probe."""

    clients: int
    steps: int  # of a client and round
    watched: int  # clients, one at a time


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


@dataclasses.dataclass(frozen=True)
class Weights:
    """How much clients weigh for each other after the second round; medians over clients."""

    own: float  # of a client's own model
    strongest: float  # of the other client that weighs most
    others: float  # how many others count: exp of the entropy of their weights


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """What a run will do. `warnings` says, in sentences, what in it can do nothing, and what to do about it."""

    method: str
    data: str
    model: str
    rounds: int
    clients: dict[str, dict[str, int]]  # training, validation and test examples by client
    steps: dict[str, int]  # of a client and round: least, median, most; and all of the run
    participants: int  # in a round
    hearing: str  # who hears whom, in a sentence
    traffic: Traffic | None
    memory: Memory
    warnings: list[str]
    pull_option: str = ""
    pull: Pull | None = None
    progress: float | None = None
    weights: Weights | None = None
    seconds: tuple[float, float] | None = None  # of the whole run, from and to
    probe: dict[str, Any] | None = None  # what was tried: clients, steps of each, rounds, seconds

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        pull = None if self.pull is None else self.pull._asdict()
        return dataclasses.asdict(self) | {"pull": pull}


def plan(
    method: str | AnyMethod | None = None, data: Data | None = None, *, model: Model | None = None, **settings: Any
) -> RunPlan:
    """Say what `coterie.run` with the same arguments would do, without doing it.

    Args:
        method: as in `coterie.run`.
        data: as in `coterie.run`.
        model: as in `coterie.run`.
        **settings: as in `coterie.run`.

    Returns:
        What the run will do, and `warnings` about what in it can do nothing.

    Raises:
        ConfigError: settings are wrong; it lists every problem.
        DataError: the data are missing or malformed.
    """
    return plan_setup(prepare(method, data, model=model, **settings))


def plan_setup(setup: Setup) -> RunPlan:
    """Plan a run that is prepared; the probe takes some seconds."""
    begin = time.perf_counter()
    first, size = _without_probe(setup), _size(setup)
    sim = _probe(setup, size.clients, size.steps)
    found: dict[str, Any] = {"warnings": list(first.warnings), "traffic": first.traffic}
    with python_warnings.catch_warnings(record=True) as caught:
        python_warnings.simplefilter("always", CoterieWarning)
        try:
            found |= _measured(setup, sim, size, first)
        except CoterieError as error:  # it diverged
            found["warnings"].append(str(error).replace("; the checkpoints before this round are kept", ""))
    said = [str(each.message) for each in caught if issubclass(each.category, CoterieWarning)]
    found["warnings"] = list(dict.fromkeys([*found["warnings"], *said]))
    found["probe"] = {
        "clients": len(sim.federation.names),
        "steps": max(sim.steps(i) for i in range(len(sim.federation.names))),
        "rounds": 2,
        "seconds": time.perf_counter() - begin,
    }
    return dataclasses.replace(first, **found)


def first_look(setup: Setup) -> RunPlan:
    """Plan a run that is about to begin, in a fraction of a second: bytes, and what certainly does nothing."""
    first = _without_probe(setup)
    if not setup.method.pull_option or _slow(setup) or setup.config.method == "local":
        return first
    sim = _probe(setup, 2, 4)
    with python_warnings.catch_warnings():
        python_warnings.simplefilter("ignore", CoterieWarning)  # the run will say it
        try:
            sim.train(1, Engine("loop"))
            pull = pull_of(sim, 2, [0])
        except CoterieError:
            return first
    return dataclasses.replace(first, pull=pull, warnings=[*first.warnings, *_inert(setup, pull, first.steps)])


def _without_probe(setup: Setup) -> RunPlan:
    """Plan what needs no training: everything but the pull, the weights and the minutes."""
    config, federation = setup.config, setup.federation
    size = len(federation.names)
    each = [config.plan().num_steps(number) for number in federation.sizes]
    participants = config.participants(size)
    steps = {
        "least": min(each),
        "median": int(median(each)),
        "most": max(each),
        "all": round(config.rounds * participants * sum(each) / size),
    }
    counts = {
        name: {part: len(split[part]) for part in ("train", "validation", "test")}  # type: ignore[literal-required]
        for name, split in federation.clients.items()
    }
    taking_part = _rounds_of_each(setup)
    return RunPlan(
        method=config.method,
        data=config.data,
        model=config.model,
        rounds=config.rounds,
        clients=counts,
        steps=steps,
        participants=participants,
        hearing=_hearing(setup, taking_part),
        traffic=_traffic(setup),
        memory=_memory(setup),
        warnings=_certain(setup, taking_part),
        pull_option=setup.method.pull_option,
    )


def _measured(setup: Setup, sim: Probe, size: Size, first: RunPlan) -> dict[str, Any]:
    """Run the probe; return what it shows, as fields of `RunPlan`."""
    engine = _engine(setup, sim)
    one = sim.train(1, engine)
    watched = _spread(sim.federation, size.watched)
    pull = pull_of(sim, 2, watched) if setup.method.pull_option else None
    before = sim.views(1, engine)
    begin = time.perf_counter()
    two = sim.train(2, engine)
    seconds = time.perf_counter() - begin
    progress = progress_of(sim, before, sim.views(2, engine), 2, watched)
    begin = time.perf_counter()
    sim.evaluate(2, engine)
    evaluating = time.perf_counter() - begin
    collaboration = two.server_info.get("collaboration")
    weights = _weights(collaboration) if collaboration is not None and len(collaboration) > 2 else None
    warnings = [
        *first.warnings,
        *_inert(setup, pull, first.steps),
        *_held(setup, pull, progress),
        *_one_sided(setup, collaboration, two.server_info.get("weight"), sim.federation.names),
    ]
    clients = len(sim.federation.names)
    of_run = seconds * first.steps["all"] / sum(map(sim.steps, range(clients)))
    evaluations = -(-setup.config.rounds // setup.config.evaluate_every) * len(first.clients) / clients
    return {
        "pull": pull,
        "progress": progress,
        "weights": weights,
        "warnings": warnings,
        "traffic": first.traffic or _about(setup, (one.bytes_up, one.bytes_down), (two.bytes_up, two.bytes_down), sim),
        "seconds": _seconds(setup, of_run, evaluating * evaluations),
    }


# ---- the probe's federation


def _slow(setup: Setup) -> bool:
    """Return whether a step takes more than some milliseconds."""
    return setup.task.convolves or tree.nbytes(setup.task.init()) > 2**20


def _size(setup: Setup) -> Size:
    """Return how much a probe tries: less, the longer a step takes. It does not depend on the machine."""
    model = tree.nbytes(setup.task.init())
    if not _slow(setup):
        clients, steps, watched = MAX_EXACT, 200, 3
    elif model <= 2**22:
        clients, steps, watched = 8, 20, 2
    else:
        clients, steps, watched = 2, 4, 1
    wanted = max(setup.config.participants(len(setup.federation.names)), 8)
    return Size(max(2, min(clients, wanted, KEPT_BYTES // (4 * model))), steps, watched)


def _probe(setup: Setup, clients: int, steps: int) -> Probe:
    """Make a simulation of so many of the clients, all of whom take part in every round."""
    names = setup.federation.names
    chosen = [names[i] for i in _spread(setup.federation, clients)]
    federation = setup.federation
    if len(chosen) < len(names):
        federation = dataclasses.replace(federation, clients={name: federation.clients[name] for name in chosen})
    place = setup.peers if len(chosen) == len(names) else None
    config = setup.config
    sim = Probe.start(setup.method, setup.task, federation, config.plan(), len(chosen), config.seed, place=place)
    sim.most = steps
    return sim


def _spread(federation: Federation, number: int) -> list[int]:
    """Choose clients from the largest to the smallest, in order of their ids."""
    by_size = sorted(range(len(federation.names)), key=federation.rank.__getitem__)
    if number >= len(by_size):
        return sorted(by_size)
    if number == 1:
        return [by_size[len(by_size) // 2]]
    return sorted(by_size[round(i * (len(by_size) - 1) / (number - 1))] for i in range(number))


def _engine(setup: Setup, sim: Probe) -> Engine:
    """Return the faster engine for the probe, or the one that always works if clients cannot be stacked."""
    if setup.task.convolves:
        return Engine("loop")
    stacked = Engine("stacked", chunk=MAX_EXACT)
    fn, ids, rows_of = dataclasses.replace(sim, most=1).probe()
    try:
        stacked.map(fn, sim.federation, ids[:2], rows_of, "probe")
    except RuntimeError:
        return Engine("loop")
    return stacked


# ---- what needs no training


def _rounds_of_each(setup: Setup) -> list[int] | None:
    """Return in how many rounds each client takes part; None if that is long to find out."""
    config, size = setup.config, len(setup.federation.names)
    participants = config.participants(size)
    if participants >= size:
        return [config.rounds] * size
    if config.rounds * size > MAX_SAMPLED:
        return None
    empty = State((), ())
    sim = Probe(setup.method, setup.task, setup.federation, config.plan(), participants, config.seed, empty)
    times = [0] * size
    for number in range(1, config.rounds + 1):
        for client in sim.sample(number):
            times[client] += 1
    return times


def _hearing(setup: Setup, times: list[int] | None) -> str:
    config, size = setup.config, len(setup.federation.names)
    participants = config.participants(size)
    if config.method == "local":
        return "nobody hears anybody"
    who = f"all {size} clients take part in every round"
    if participants < size:
        often = "" if times is None else f": each in {_range(min(times), max(times))} of {config.rounds} rounds"
        who = f"{participants} of {size} clients take part in a round{often}"
    if config.clients_heard is not None and config.clients_heard < participants:
        who += f", of whom {config.clients_heard} are heard"
    if isinstance(setup.peers, Peers):
        near = [len(each) - 1 for each in setup.peers.near]
        return f"{who}; a client hears {_range(min(near), max(near))} neighbours"
    return f"{who}, through one server"


def _certain(setup: Setup, times: list[int] | None) -> list[str]:
    """Return the warnings that follow from the settings alone."""
    config, method, size = setup.config, setup.method, len(setup.federation.names)
    if config.method == "local":
        return []
    participants = config.participants(size)
    heard = min(participants, config.clients_heard or participants)
    found = method.cautions(setup.task, Population(size, participants, setup.task))
    if size == 1:
        found.append("there is only one client, so it hears nobody: give the data of more clients")
    if times is not None and (never := times.count(0)):
        found.append(
            f"{never} of {size} clients take part in no round and learn nothing: raise rounds, fraction or "
            "clients_per_round"
        )
    if isinstance(setup.peers, Peers):
        if (parts := _components(setup.peers)) > 1:
            found.append(
                f"the graph of peers has {parts} parts, which never hear of each other: add edges between them"
            )
    elif heard == 1 < size and not _keeps_models(setup):
        key = "clients_heard" if participants > 1 else "clients_per_round"
        found.append(f"only one client is heard in a round, so there is nothing to combine: raise {key} (or fraction)")
    return found


def _keeps_models(setup: Setup) -> bool:
    """Return whether the server remembers clients of earlier rounds, so that it combines even what one client says."""
    return "collaboration" in setup.method.server_info(_server(setup, 2))


def _components(peers: Peers) -> int:
    group = list(range(len(peers.near)))
    for _ in peers.near:
        new = [min(group[j] for j in near) for near in peers.near]
        if new == group:
            break
        group = new
    return len(set(group))


def _traffic(setup: Setup) -> Traffic | None:
    """Return the bytes of a run whose messages have one size; None if only training shows what is sent."""
    method, config, size = setup.method, setup.config, len(setup.federation.names)
    if type(method).message_bytes is not Method.message_bytes:
        return None
    participants = config.participants(size)
    model = tree.nbytes(setup.task.init())
    if size <= MAX_EXACT and size * model <= KEPT_BYTES:
        sim = _probe(setup, size, 0)
        sim.participants = participants
        up, down = sim.traffic()
        return Traffic(up, down, config.rounds * (up + down), exact=participants == size or setup.peers is None)
    number = max(2, min(MAX_EXACT, KEPT_BYTES // model))
    (up, down), (up2, down2) = (_probe(setup, each, 0).traffic() for each in (number, number // 2))
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


def _about(setup: Setup, one: tuple[int, int], two: tuple[int, int], sim: Probe) -> Traffic:
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
    return Traffic(*later, sum(first) + (setup.config.rounds - 1) * sum(later), exact=False)


def _server(setup: Setup, size: int) -> Tree:
    params = setup.task.init()
    keys = rng.keys_of([f"client-{i}" for i in range(size)])
    return setup.method.init_server(params, Population(size, size, setup.task, keys))  # type: ignore[no-any-return]


def _memory(setup: Setup) -> Memory:
    params, size = setup.task.init(), len(setup.federation.names)
    model = tree.nbytes(params)
    clients = size * tree.nbytes(setup.method.init_client(params))
    few = [min(size, number) for number in (4, 8, 12)] if size > 12 else [size]
    held = [tree.nbytes(_server(setup, number)) for number in few]
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


# ---- what the probe shows


def _inert(setup: Setup, pull: Pull | None, steps: dict[str, int]) -> list[str]:
    """Warn of a pull that does nothing."""
    if pull is None or pull.reach >= INERT:
        return []
    stronger = _change(setup, more=True)
    if pull.strength == 0:
        one = steps["most"] == 1
        why = ", which with one step a round begins and ends where there is none" if one else ""
        remedy = "take more local steps" if one else f"choose {stronger}"
        return [f"the pull of {setup.config.method} is 0{why}: {remedy}"]
    return [
        f"the pull of {setup.config.method} is {pull.strength:.1g} of the data's gradient over a round, so it does "
        f"next to nothing: choose {stronger}"
    ]


def _held(setup: Setup, pull: Pull | None, progress: float | None) -> list[str]:
    """Warn of a pull that holds the model where it is."""
    if pull is None or pull.movement is None or pull.movement > BINDS:
        return []
    moved = pull.movement if progress is None else progress
    if moved >= HELD:
        return []
    return [
        f"the pull of {setup.config.method} holds a client's model where it is: a round moves it {moved:.1%} as far as "
        f"training alone would: choose {_change(setup, more=False)}, or larger step sizes of the model that is pulled to"
    ]


def _change(setup: Setup, *, more: bool) -> str:
    option = setup.method.pull_option
    name = option.removeprefix("1/")
    now = getattr(setup.method, name, None)
    larger = more is not option.startswith("1/")
    return f"a {'larger' if larger else 'smaller'} {name}" + (f" than {now:g}" if isinstance(now, int | float) else "")


def _weights(collaboration: Tensor) -> Weights:
    own = collaboration.diagonal()
    others = collaboration - torch.diag(own)
    share = others / others.sum(1, keepdim=True).clamp_min(1e-12)
    number = torch.special.entr(share).sum(1).exp() * (others.sum(1) > 0)
    return Weights(*(float(each.median()) for each in (own, others.amax(1), number)))


def _one_sided(setup: Setup, collaboration: Tensor | None, weight: Tensor | None, names: tuple[str, ...]) -> list[str]:
    """Warn of weights between clients, or of clients in what they share, that leave nothing to learn."""
    name, found = setup.config.method, []
    look = f"'coterie methods {name}' lists the options that decide this"
    if collaboration is not None and len(collaboration) > 1:
        own, size = collaboration.diagonal(), len(collaboration)
        if float(own.median()) >= CERTAIN:
            found.append(f"a client weighs {float(own.median()):.4f} for itself, so {name} is training alone: {look}")
        elif float(collaboration.amax(1).median()) >= CERTAIN:
            found.append(f"clients' weights are one-hot: each hears a single client, and that one's model only: {look}")
        elif size > 2 and float((collaboration * size - 1).abs().max()) <= ALIKE:
            found.append(f"every client weighs all others alike, so {name} pulls all to one mean: {look}")
    if weight is not None and len(weight) > 1 and weight.ndim == 1 and float(weight.max()) >= CERTAIN:
        found.append(
            f"client '{names[int(weight.argmax())]}' weighs {float(weight.max()):.4f} in what is shared, and nobody "
            f"else is heard: choose another weighting ({look})"
        )
    return found


def _seconds(setup: Setup, training: float, evaluating: float) -> tuple[float, float]:
    """Return how long the run may take, from and to, if its clients' steps took `training` uncompiled on one core."""
    config = setup.config
    runs = 2 if config.reference and config.method != "local" else 1
    compiles = config.compile is not False and unavailable() is None
    saved = (FASTER[setup.task.convolves] if compiles else 1) * (config.workers or cores())
    return STARTUP + runs * (training / saved + evaluating / 2), STARTUP + runs * (training + evaluating)


def _range(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"
