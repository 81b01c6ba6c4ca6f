"""The server side as a site sees it, in the form that a `Simulation` asks for: a site is a simulation of one client.

`Elsewhere`: there is a server; what arrived is what it sent. `Own`: the site is a peer, with a copy of the server.
Both keep the message that would be aggregated: it is what the site has to say.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie import tree
from coterie.engine.central import AnyMethod, Draw, Send
from coterie.method import Info, Population
from coterie.tree import Params, Tree


@dataclass
class Elsewhere:
    down: Tree  # what the server dispatched, or would have the site deploy; no client axis
    shared: Params | None = None  # the model for everybody, if the method has one
    said: Tree = field(default=None, init=False)

    def start(self, method: AnyMethod, params: Params, population: Population) -> Tree:
        return ()

    def send(self, send: Send, server: Tree, ids: Tensor, draw: Draw) -> Tree:
        return tree.broadcast(self.down, 1)

    def aggregate(self, method: AnyMethod, server: Tree, ids: Tensor, ups: Tree) -> Tree:
        self.said = tree.rows(ups, 0)
        return server

    def info(self, method: AnyMethod, server: Tree) -> Info:
        return {}

    def models(self, method: AnyMethod, server: Tree, size: int) -> Params | None:
        return None if self.shared is None else tree.broadcast(self.shared, size)

    def traffic(self, method: AnyMethod, ids: Tensor, ups: Tree, down: Tree) -> tuple[int, int]:
        return 0, 0


@dataclass
class Own:
    """`server` is this peer's copy; `index` is its place among all clients."""

    index: int
    said: Tree = field(default=None, init=False)

    def start(self, method: AnyMethod, params: Params, population: Population) -> Tree:
        return method.init_server(params, population)

    def send(self, send: Send, server: Tree, ids: Tensor, draw: Draw) -> Tree:
        return send(server, torch.tensor([self.index]), draw())

    def aggregate(self, method: AnyMethod, server: Tree, ids: Tensor, ups: Tree) -> Tree:
        self.said = tree.rows(ups, 0)
        return server

    def info(self, method: AnyMethod, server: Tree) -> Info:
        return {}

    def models(self, method: AnyMethod, server: Tree, size: int) -> Params | None:
        shared = method.global_model(server)
        return None if shared is None else tree.broadcast(shared, size)

    def traffic(self, method: AnyMethod, ids: Tensor, ups: Tree, down: Tree) -> tuple[int, int]:
        return 0, 0
