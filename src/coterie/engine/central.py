"""One server hears everybody and combines the messages. In `peers.py`, every peer has a copy of the server instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from coterie.core import routes, tree
from coterie.core.method import Info, Method, Population
from coterie.core.tree import Params, Tree
from coterie.engine.engine import threads_for
from coterie.profiling import timed

AnyMethod = Method[Any, Any, Any, Any]
Send = Callable[[Tree, Tensor, torch.Generator], Tree]  # a method's `dispatch` or `deploy`
Draw = Callable[[], torch.Generator]  # the round's generator, from its start at every call


class Place(Protocol):
    """What a simulation asks of the server side, wherever that is."""

    def start(self, method: AnyMethod, params: Params, population: Population) -> Tree:
        """Return the server's state before the first round."""

    def send(self, method: AnyMethod, send: Send, server: Tree, ids: Tensor, draw: Draw) -> Tree:
        """Return what the clients `ids` are sent, as rows. `send` is the method's `dispatch` or `deploy`."""

    def aggregate(self, method: AnyMethod, server: Tree, ids: Tensor, ups: Tree) -> Tree:
        """Return the server's state after it has heard `ups` from the clients `ids`."""

    def info(self, method: AnyMethod, server: Tree) -> Info:
        """Return what the record of a round says of the server."""

    def models(self, method: AnyMethod, server: Tree, size: int) -> Params | None:
        """Return the model for everybody as rows, one for each client; None if the method has no such model."""

    def traffic(self, method: AnyMethod, ids: Tensor, ups: Tree, down: Tree) -> tuple[int, int]:
        """Return the bytes that a round sent (up, down)."""


class Central:
    """One server."""

    def start(self, method: AnyMethod, params: Params, population: Population) -> Tree:
        return method.init_server(params, population)

    def send(self, method: AnyMethod, send: Send, server: Tree, ids: Tensor, draw: Draw) -> Tree:
        with threads_for(server):
            return send(server, ids, draw())

    @timed("aggregate")
    def aggregate(self, method: AnyMethod, server: Tree, ids: Tensor, ups: Tree) -> Tree:
        with threads_for(ups):
            return method.aggregate(server, ids, ups)

    def info(self, method: AnyMethod, server: Tree) -> Info:
        return method.server_info(server)

    def models(self, method: AnyMethod, server: Tree, size: int) -> Params | None:
        shared = method.global_model(server)
        return None if shared is None else tree.broadcast(shared, size)

    def traffic(self, method: AnyMethod, ids: Tensor, ups: Tree, down: Tree) -> tuple[int, int]:
        return method.message_bytes(ups), routes.sent_bytes(down)
