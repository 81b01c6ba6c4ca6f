"""Where messages are combined: by one server that hears everybody. `peers.py` has the other answer, a copy a peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from coterie import tree
from coterie.engine.engine import threads_for
from coterie.method import Info, Method, Population
from coterie.spans import timed
from coterie.tree import Params, Tree

AnyMethod = Method[Any, Any, Any, Any]
Send = Callable[[Tree, Tensor, torch.Generator], Tree]  # a method's `dispatch` or `deploy`
Draw = Callable[[], torch.Generator]  # the round's generator, from its start at every call


class Place(Protocol):
    """What a simulation asks of the server side, wherever it is."""

    def start(self, method: AnyMethod, params: Params, population: Population) -> Tree: ...
    def send(self, send: Send, server: Tree, ids: Tensor, draw: Draw) -> Tree: ...
    def aggregate(self, method: AnyMethod, server: Tree, ids: Tensor, ups: Tree) -> Tree: ...
    def info(self, method: AnyMethod, server: Tree) -> Info: ...
    def models(self, method: AnyMethod, server: Tree, size: int) -> Params | None: ...
    def traffic(self, method: AnyMethod, ids: Tensor, ups: Tree, down: Tree) -> tuple[int, int]: ...


class Central:
    """One server."""

    def start(self, method: AnyMethod, params: Params, population: Population) -> Tree:
        return method.init_server(params, population)

    def send(self, send: Send, server: Tree, ids: Tensor, draw: Draw) -> Tree:
        with threads_for(server):
            return send(server, ids, draw())

    @timed("aggregate")
    def aggregate(self, method: AnyMethod, server: Tree, ids: Tensor, ups: Tree) -> Tree:
        with threads_for(ups):
            return method.aggregate(server, ids, ups)

    def info(self, method: AnyMethod, server: Tree) -> Info:
        return method.server_info(server)

    def models(self, method: AnyMethod, server: Tree, size: int) -> Params | None:
        """The model for everybody as rows, one a client, if there is one."""
        shared = method.global_model(server)
        return None if shared is None else tree.broadcast(shared, size)

    def traffic(self, method: AnyMethod, ids: Tensor, ups: Tree, down: Tree) -> tuple[int, int]:
        """Bytes sent (up, down)."""
        return method.message_bytes(ups), tree.nbytes(down)
