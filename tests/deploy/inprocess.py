"""Sites in this process: a queue that can drop, delay, duplicate, corrupt and kill, under a clock of its own."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

import torch

from coterie.core import tree
from coterie.data import Federation, from_clients
from coterie.deploy import wire
from coterie.deploy.contract import Rules
from coterie.deploy.keys import make_identity
from coterie.deploy.ledger import Ledger
from coterie.deploy.server import Server
from coterie.deploy.site import Site
from coterie.deploy.site_data import one_client
from coterie.deploy.store import Store
from coterie.deploy.wire import Envelope
from coterie.engine import Engine, make_peers
from coterie.experiment.setup import prepare
from coterie.experiment.simulation import Simulation

SIZES = (12, 5, 9, 7)
NAMES = ("a", "b", "c", "d")
SETTINGS = {
    "rounds": 3,
    "batch_size": 4,
    "local_epochs": 1,
    "seed": 3,
    "engine": "loop",
    "compile": False,
    "workers": 1,
}
IDENTITIES = {name: make_identity() for name in (*NAMES, "server", "stranger")}


def forged(header: dict, body: bytes, name: str) -> Envelope:
    """Whatever the owner of that key could sign."""
    data = json.dumps({**header, "body": wire.digest(body)}, separators=(",", ":")).encode()
    return Envelope(data, body, IDENTITIES[name].sign(data))


class Killed(BaseException):
    """The site's process dies here."""


class ServerKilled(BaseException):
    """The server's process dies here."""


class Queue:
    """`fault(direction, site, round, envelope)` returns the envelopes that go on (none: lost), or a number of seconds
    after which the envelope goes on, or raises `Killed`."""

    def __init__(self, sites: dict[str, Site], fault=None) -> None:
        self.sites, self.fault = sites, fault or (lambda direction, name, round, envelope: [envelope])
        self.time = 0.0
        self.inbox: deque = deque()
        self.replies: deque = deque()
        self.later: list = []
        self.seen: list[tuple[str, str, int, Envelope]] = []  # all that passed, as the server sees it
        self.gone: set[str] = set()
        self.elsewhere: dict[str, str] = {}  # sites that have another address than at first

    def addresses(self) -> set[str]:
        return {self._address(name) for name in self.sites if name not in self.gone}

    def _address(self, name: str) -> str:
        return self.elsewhere.get(name, f"node-{name}")

    def post(self, letters) -> None:
        for address, envelope in letters.items():
            name = next((name for name in self.sites if self._address(name) == address), None)
            if name is not None:
                self.inbox.append((name, envelope))

    def now(self) -> float:
        return self.time

    def poll(self, seconds: float):
        self.time += seconds
        for entry in [each for each in self.later if each[0] <= self.time]:
            self.later.remove(entry)
            self.replies.append(entry[1:])
        while self.inbox:
            name, envelope = self.inbox.popleft()
            if name in self.gone:
                continue
            for request in self._through("to", name, envelope):
                try:
                    answer = self.sites[name].answer(request)
                except Killed:
                    self.replies.append((self._address(name), None))
                    continue
                for reply in self._through("from", name, answer):
                    self.replies.append((self._address(name), reply))
        found, self.replies = list(self.replies), deque()
        return found

    def _through(self, direction: str, name: str, envelope: Envelope) -> list[Envelope]:
        header = json.loads(envelope.header)
        self.seen.append((direction, name, header["round"], envelope))
        what = (
            self.fault(direction, name, header["round"], envelope)
            if header["kind"] not in ("join", "joined")
            else [envelope]
        )
        if isinstance(what, int | float):
            assert direction == "from"
            self.later.append((self.time + what, self._address(name), envelope))
            return []
        return what


def data(regression: bool = False) -> Federation:
    draw = torch.Generator().manual_seed(1)
    clients = {}
    for i, (name, size) in enumerate(zip(NAMES, SIZES, strict=True)):
        x = torch.randn(size * 2, 5, generator=draw) + 0.3 * i
        y = x.sum(1) if regression else (x.sum(1) + i > 1).long() + (x[:, 0] > 0.5).long()
        clients[name] = (x, y)
    return from_clients(clients, seed=3)


def net(shape: tuple[int, ...], outputs: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(shape[0], 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Dropout(0.1),
        torch.nn.Linear(6, outputs),
    )  # fmt: skip


def make(method: str, root: Path, rules: Rules | None = None, fault=None, **settings):
    """(setup, server, queue): a federation in this process, and the setup a simulation of it has."""
    setup = prepare(method, data(), model=net, **{**SETTINGS, **settings})
    sites = {
        name: Site(
            name,
            setup.config,
            setup.method,
            net,
            one_client(setup.federation, name),
            IDENTITIES[name],
            root / name,
            secure=rules is not None and rules.secure,
        )
        for name in setup.federation.names
    }
    queue = Queue(sites, fault)
    rules = rules or Rules(sites=len(sites), deadline=30, joining=30)
    server = Server(setup.config, setup.method, net, queue, IDENTITIES["server"], root / "run", rules)
    return setup, server, queue


def ledger() -> Ledger:
    return Ledger.new("test")


def simulate(setup, rounds: int = 3, absent: dict[int, set[str]] | None = None) -> Simulation:
    """The simulator's loop engine; in round r, those in absent[r] are not sampled."""
    config, names = setup.config, setup.federation.names
    place = make_peers(config.topology, names, config.seed)
    sim = Simulation.start(
        setup.method,
        setup.task,
        setup.federation,
        config.plan(),
        config.participants(len(names)),
        config.seed,
        place=place,
    )
    sim.heard, sim.sampler = config.clients_heard, config.sampler
    sampled = sim.sample
    sim.sample = lambda round: [i for i in sampled(round) if names[i] not in (absent or {}).get(round, ())]
    for number in range(1, rounds + 1):
        sim.train(number, Engine("loop"))
    return sim


def same(one, other) -> bool:
    one, other = tree.pack(one), tree.pack(other)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def private(queue: Queue, book: Ledger, name: str):
    """What a site has on its disk, after its last round."""
    site = queue.sites[name]
    workbench = next(iter(site._workbenches.values()))
    store = Store(site.root, book.run, name)
    like = workbench.initial()
    if site.config.topology != "server":
        like = workbench.initial_of_peer(torch.zeros(len(NAMES), dtype=torch.int64), 1, NAMES.index(name))
    return store._read("state", store.states()[-1], like)


TABLE = {
    "run": "stroke-0a1b",
    "round": 3,
    "rounds": 4,
    "metric": "accuracy",
    "doing": "",
    "finished": False,
    "sites": {
        "aachen": {
            **{"state": "silent", "round": 2, "seen": 1.0, "loss": 0.5, "metric": 0.75},
            **{"bytes_up": 1_200_000, "bytes_down": 900, "refused": {"late": 2}},
        }
    },
}
