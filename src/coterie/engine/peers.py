"""Clients on a graph, without a server. A peer is a client and a private copy of the server, fed by its neighbours.

In each round a peer sends itself what its own copy dispatches, does its local update, and sends its message to its
neighbours. Every copy then aggregates the messages of its closed neighbourhood (itself included). A method file does
not know the difference. On the complete graph, all copies stay equal to the one server there would be (law 2).

Where a method names whom a client asks and to whom it writes (`coterie.core.routes`), a copy holds the peer's own rows
only: rows that it asks for come from their owners, for this one use, and a neighbour to whom nothing is addressed hears
only that the peer took part.

Graphs: `complete`, `ring`, `star` (the first client is its centre), `k-regular:K` (random), `small-world:K:P`
(Watts and Strogatz: a ring of K nearest neighbours, each edge rewired with probability P), or edges of the user's
own, by name. The random ones are drawn until they are connected.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.core import rng, routes, tree
from coterie.core.errors import ConfigError
from coterie.core.method import Info, Population
from coterie.core.tree import Params, Tree
from coterie.engine.central import AnyMethod, Draw, Send
from coterie.profiling import timed

Edge = tuple[str, str]
PARAMETERS = {"server": (), "complete": (), "ring": (), "star": (), "k-regular": (4,), "small-world": (4, 0.1)}
MAX_DRAWS = 100  # of a random graph, until it is connected


@dataclass(frozen=True)
class Peers:
    """The server side where there is no server: a copy of it for each peer, as rows."""

    near: tuple[tuple[int, ...], ...]  # each peer's neighbours and itself, in order

    def start(self, method: AnyMethod, params: Params, population: Population) -> Tree:
        """Make all copies; each is told how many peers it can hear in a round."""
        own = population._replace(store=None)  # copies are rows themselves
        heard = [
            own._replace(audience=min(own.audience, len(near)), holds=torch.tensor([i]))
            for i, near in enumerate(self.near)
        ]
        return tree.stack([method.init_server(params, each) for each in heard])

    def send(self, method: AnyMethod, send: Send, server: Tree, ids: Tensor, draw: Draw) -> Tree:
        """Let every peer ask its own copy. All use the same random numbers, as clients of one server would."""
        downs = _joined([send(tree.rows(server, i), torch.tensor([i]), draw()) for i in ids.tolist()])
        if routes.asked(downs) is None:
            return downs
        owners = torch.arange(len(self.near))
        return routes.fetch(downs, _joined([method.offer(tree.rows(server, i), owners[i : i + 1]) for i in owners]))

    @timed("aggregate")
    def aggregate(self, method: AnyMethod, server: Tree, ids: Tensor, ups: Tree) -> Tree:
        copies = []
        for i, near in enumerate(self.near):
            heard = torch.isin(ids, torch.tensor(near)).nonzero().flatten()
            own = tree.rows(server, i)
            those = routes.heard_by(i, ids[heard], tree.rows(ups, heard))
            copies.append(method.aggregate(own, ids[heard], those) if len(heard) else own)
        return tree.stack(copies)

    def info(self, method: AnyMethod, server: Tree) -> Info:
        """Return what each copy says, as rows; of who learns from whom, each peer's own row."""
        infos = tree.stack([method.server_info(tree.rows(server, i)) for i in range(len(self.near))])
        if "collaboration" in infos:
            rows = infos["collaboration"]  # [peers, clients whose rows a copy holds, clients]
            infos["collaboration"] = rows[:, 0] if rows.shape[1] == 1 else rows.diagonal(dim1=0, dim2=1).T.contiguous()
        return infos

    def models(self, method: AnyMethod, server: Tree, size: int) -> Params | None:
        found = [method.global_model(tree.rows(server, i)) for i in range(size)]
        return None if found[0] is None else tree.stack(found)

    def traffic(self, method: AnyMethod, ids: Tensor, ups: Tree, down: Tree) -> tuple[int, int]:
        """Count what peers tell each other, and what they get of what they ask for; what one sends itself is free."""
        neighbours = [len(self.near[i]) - 1 for i in ids.tolist()]
        if isinstance(ups, routes.Addressed):
            return routes.peer_bytes(ids, neighbours, ups, down)
        each = [method.message_bytes(tree.rows(ups, row[None])) for row in torch.arange(len(ids))]
        return sum(size * number for size, number in zip(each, neighbours, strict=True)), 0


def _joined(rows: list[Tree]) -> Tree:
    return tree.map(lambda *leaf: torch.cat(leaf), rows[0], *rows[1:])


def make_peers(topology: str | Sequence[Edge], names: Sequence[str], seed: int) -> Peers | None:
    """Make the graph over clients.

    Args:
        topology: the graph in words (see above), or its edges as pairs of clients' names.
        names: the clients, in their order.
        seed: what random graphs are drawn with.

    Returns:
        The peers; None for a server.

    Raises:
        ConfigError: an edge names a client that there is not, or there is no such graph.
    """
    size = len(names)
    if not isinstance(topology, str):
        place = {name: i for i, name in enumerate(names)}
        if unknown := sorted({name for edge in topology for name in edge} - place.keys()):
            raise ConfigError([f"topology: there is no client {', '.join(map(repr, unknown))}"])
        return _peers(size, ((place[a], place[b]) for a, b in topology))
    kind, *numbers = parse(topology)
    if kind == "server":
        return None
    everyone = range(size)
    if kind == "complete":
        return _peers(size, ((i, j) for i in everyone for j in everyone))
    if kind == "ring":
        return _peers(size, ((i, (i + 1) % size) for i in everyone))
    if kind == "star":
        return _peers(size, ((0, i) for i in everyone))
    degree = int(numbers[0])
    if degree >= size or (kind == "k-regular" and degree * size % 2):
        rule = "and an even product of both" if kind == "k-regular" else "at least"
        raise ConfigError(
            [f"topology = {topology!r}: {degree} neighbours need {degree + 1} clients {rule}; have {size}"]
        )
    return _peers(size, _random_edges(kind, size, numbers, seed))


def parse(topology: str) -> tuple[Any, ...]:
    """Split a graph's name into (kind, its numbers).

    Raises:
        ValueError: it is no graph; the message says what is.
    """
    kind, *given = topology.split(":")
    defaults = PARAMETERS.get(kind, ())
    try:
        numbers = [type(default)(text) for default, text in zip(defaults, given, strict=False)]
    except ValueError:
        kind = ""
    if kind not in PARAMETERS or len(given) > len(defaults):
        raise ValueError(
            f"choose from {', '.join(PARAMETERS)} (k-regular:4, small-world:4:0.1), or a CSV file of edges"
        )
    numbers += defaults[len(numbers) :]
    if kind == "k-regular" and numbers[0] < 2:
        raise ValueError("a peer needs at least 2 neighbours")
    if kind == "small-world" and (numbers[0] < 2 or numbers[0] % 2 or not 0 <= numbers[1] <= 1):
        raise ValueError("a small world needs an even number of neighbours and a probability between 0 and 1")
    return kind, *numbers


def read_edges(path: Path) -> list[Edge]:
    """Read a CSV file with an edge in every line: two names of clients with a comma between.

    Raises:
        ValueError: a line is something else; the message names it.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = [[cell.strip() for cell in row] for row in csv.reader(file) if row]
    if bad := [str(number) for number, row in enumerate(rows, 1) if len(row) != 2]:
        raise ValueError(f"an edge is two names with a comma between; not so in line {', '.join(bad)} of '{path}'")
    return [(row[0], row[1]) for row in rows]


def _peers(size: int, edges: Iterable[tuple[int, int]]) -> Peers:
    near: list[set[int]] = [{i} for i in range(size)]
    for a, b in edges:
        near[a].add(b)
        near[b].add(a)
    return Peers(tuple(tuple(sorted(each)) for each in near))


def _random_edges(kind: str, size: int, numbers: Sequence[Any], seed: int) -> Iterable[tuple[int, int]]:
    try:
        import networkx as nx
    except ImportError:
        raise ConfigError([f"topology = '{kind}' needs networkx: pip install 'coterie[peers]'"]) from None
    for attempt in range(MAX_DRAWS):
        draw = rng.seed_of(seed, "topology", attempt) % 2**32
        make = nx.random_regular_graph if kind == "k-regular" else nx.watts_strogatz_graph
        order = (numbers[0], size) if kind == "k-regular" else (size, *numbers)
        graph = make(*order, seed=draw)
        if nx.is_connected(graph):
            edges: list[tuple[int, int]] = list(graph.edges)
            return edges
    raise ConfigError(
        [f"topology = '{kind}': no connected graph of {size} clients in {MAX_DRAWS} draws; use more neighbours"]
    )
