"""The server as a site sees it, with the interface that a `Simulation` needs: a site is a simulation of one client.

With a `RemoteServer`, the site received what the server sent. With an `OwnServer`, the site is a peer that has its own
copy of the server. Both keep the `message` that would be aggregated, which the site sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.core import routes, tree
from coterie.core.method import Info, Population
from coterie.core.tree import Params, Tree
from coterie.engine.central import AnyMethod, Draw, Send


@dataclass
class RemoteServer:
    """A server elsewhere, which sent `down`."""

    down: Tree  # what the server dispatched or deployed; no client axis
    shared: Params | None = None  # the global model, if the method has one
    message: Tree = field(default=None, init=False)

    def start(self, method: AnyMethod, params: Params, population: Population) -> Tree:
        return ()

    def send(self, method: AnyMethod, send: Send, server: Tree, ids: Tensor, draw: Draw) -> Tree:
        return tree.broadcast(self.down, 1)

    def aggregate(self, method: AnyMethod, server: Tree, ids: Tensor, ups: Tree) -> Tree:
        self.message = tree.rows(ups, 0)
        return server

    def info(self, method: AnyMethod, server: Tree) -> Info:
        return {}

    def models(self, method: AnyMethod, server: Tree, size: int) -> Params | None:
        return None if self.shared is None else tree.broadcast(self.shared, size)

    def traffic(self, method: AnyMethod, ids: Tensor, ups: Tree, down: Tree) -> tuple[int, int]:
        return 0, 0


@dataclass
class OwnServer:
    """A peer's own copy of the server; `index` is the peer's client id."""

    index: int
    offers: Mapping[int, Tree] = field(default_factory=dict)  # what others sent because this peer asked them
    message: Tree = field(default=None, init=False)

    def start(self, method: AnyMethod, params: Params, population: Population) -> Tree:
        return method.init_server(params, population)

    def send(self, method: AnyMethod, send: Send, server: Tree, ids: Tensor, draw: Draw) -> Tree:
        return routes.received(send(server, torch.tensor([self.index]), draw()), self.index, self.offers)

    def aggregate(self, method: AnyMethod, server: Tree, ids: Tensor, ups: Tree) -> Tree:
        self.message = tree.rows(ups, 0)
        return server

    def info(self, method: AnyMethod, server: Tree) -> Info:
        return {}

    def models(self, method: AnyMethod, server: Tree, size: int) -> Params | None:
        shared = method.global_model(server)
        return None if shared is None else tree.broadcast(shared, size)

    def traffic(self, method: AnyMethod, ids: Tensor, ups: Tree, down: Tree) -> tuple[int, int]:
        return 0, 0
