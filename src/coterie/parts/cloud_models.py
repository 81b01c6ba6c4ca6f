"""What methods share whose server makes each client a model of its own to be pulled to, the cloud model u_i.

u_i is a sum of the clients' last uploads by how alike they are (`neighbours.combined_models`). In round k of K

    w_i <- argmin_w  F_i(w) + (pull / 2) ||w - u_i||^2,    pull = lambda / alpha_k            (`pulled_update`)

which the client keeps, sends and deploys. Of a model, only trained parameters are sent; buffers and frozen weights stay
the client's own. The functions that begin with `self` are a method's as they are, as in `coterie.parts.averaging`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Literal, Protocol, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import client_rows, tree
from coterie.core.batches import Batches
from coterie.core.errors import ConfigError
from coterie.core.method import Info, Newcomer
from coterie.core.optimizers import Optimizer
from coterie.core.task import Task
from coterie.core.training import quadratic_penalty, train
from coterie.core.tree import Params
from coterie.parts.neighbours import AttentionServer, collaboration_info

Start = Literal["cloud", "own"]
Rounds = Literal["auto"] | Annotated[int, Field(ge=1)]


class CountsRounds(Protocol):
    """A method with the option K."""

    @property
    def total_rounds(self) -> Rounds: ...


Scheduled = TypeVar("Scheduled", bound=CountsRounds)


def with_rounds(method: Scheduled, rounds: int) -> Scheduled:
    """Return the method with K = `rounds` where its K is `auto`: `Method.scheduled`, if something depends on K."""
    if method.total_rounds != "auto":
        return method
    return dataclasses.replace(method, total_rounds=rounds)  # type: ignore[type-var]


def theorem_pull(option: str, total_rounds: Rounds) -> Tensor:
    """Return lambda / alpha_k = sqrt(K) of alpha_k = lambda / sqrt(K), a scalar.

    Args:
        option: what asks for it, as it is written, for the message if K is not known.
        total_rounds: K.
    """
    if isinstance(total_rounds, str):
        raise ConfigError([f"{option}: set total_rounds, K, or let coterie.run set it to rounds"])
    return torch.tensor(math.sqrt(total_rounds))


def pulled_update(
    task: Task, optimizer: Optimizer, start: Start, client: Params, u: Params, pull: Tensor, batches: Batches
) -> tuple[Params, Params, Info]:
    """Train w_i under the pull to u_i; return it, what is sent of it, and its loss: the results of a `local_update`.

    Args:
        task: the model and its loss F_i.
        optimizer: takes the steps.
        start: where they begin, at u_i (`cloud`) or at the client's `own` model.
        client: the client's own w_i, buffers included.
        u: the cloud model, trained parameters only.
        pull: lambda / alpha_k, a scalar.
        batches: the client's minibatches of the round.
    """
    begin = {**client, **u} if start == "cloud" else client
    w, loss = train(task, optimizer, begin, batches, quadratic_penalty, (u, pull))
    return w, task.split(w)[0], {"loss": loss}


def init_client(self: Any, params: Params) -> Params:
    """Return w_i before the first round: the initial model."""
    return params


def deploy(self: Any, server: AttentionServer, ids: Tensor, rng: torch.Generator) -> tuple[()]:
    """Send nothing for a view, which is the client's own model."""
    return ()


def personalize(self: Any, task: Task, client: Params, down: tuple[()], batches: Batches) -> Params:
    """Return w_i."""
    return client


def onboard(self: Any, task: Task, newcomer: Newcomer, ids: Tensor, ups: Params | None) -> Newcomer:
    """Let a newcomer join at the mean of the models that were heard, from where all others are about equally near.

    Its own data then decides whom it attends to. Its messages replace its own row of the server, and no other.
    """
    server: AttentionServer = newcomer.server
    if ups is not None:
        return newcomer._replace(server=self.aggregate(server, ids, ups))
    start = client_rows.mean(server.w, server.heard)
    joined = self.aggregate(server, ids, tree.broadcast(start, 1))
    return newcomer._replace(server=joined, params={**newcomer.params, **start})


def server_info(self: Any, server: AttentionServer) -> Info:
    """Return who learns from whom, for the report."""
    return collaboration_info(server.xi)
