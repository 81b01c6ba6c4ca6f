"""FedRep (Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021).

A model is a representation phi (the body), shared, and a head h_i, the client's own (`task.head_names`):

    h_i   <- h_i - lr * grad_h f_i(h_i, phi),          phi fixed, as received           (`local_update`)
    phi_i <- phi_i - lr * grad_phi f_i(h_i, phi_i),    h_i fixed, as just trained       (`local_update`)
    phi   <- sum_i (n_i / n) phi_i                                                      (`aggregate`)

The head goes `head_epochs` times through the round's minibatches and then the body `body_epochs` times, so that neither
is ever left untrained, whatever the number of local epochs or steps: a round takes head_epochs + body_epochs times the
steps of FedAvg's. Each phase starts its optimiser anew; what is fixed keeps its buffers too.

Deviation: phi_i are averaged in proportion to n_i, as in the public implementations, where the paper, whose clients are
alike in size, averages uniformly. Each client deploys the shared body with its own head. A newcomer trains a head on
the shared body, which stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from coterie import tree
from coterie.batches import Batches
from coterie.local import SGD, Optimizer, train
from coterie.method import Info, Method, Newcomer, Population, Sized
from coterie.task import Task
from coterie.tree import Params


@dataclass(frozen=True)
class FedRep(Method[Params, Params, Params, Sized]):
    learns_from: ClassVar[str] = "all clients, through the body that they share; the head is its own"

    optimizer: Optimizer = SGD()
    head_epochs: Annotated[int, Field(ge=1, description="times the head goes through the round's minibatches")] = 1
    body_epochs: Annotated[int, Field(ge=1, description="times the body goes through them, after the head")] = 1

    def init_server(self, params: Params, population: Population) -> Params:
        head = population.task.head_names if population.task else frozenset()
        return {name: value for name, value in params.items() if name not in head}  # phi

    def init_client(self, params: Params) -> Params:
        return params  # of which only the head is used

    def dispatch(self, server: Params, ids: Tensor, rng: torch.Generator) -> Params:
        return tree.broadcast(server, len(ids))

    def local_update(self, task: Task, client: Params, down: Params, batches: Batches) -> tuple[Params, Sized, Info]:
        theta, head_loss = train(
            task, self.optimizer, {**client, **down}, _times(batches, self.head_epochs), only=task.head_names
        )
        theta, loss = train(task, self.optimizer, theta, _times(batches, self.body_epochs), only=frozenset(down))
        phi = {name: theta[name] for name in down}
        return theta, Sized(phi, batches.count), {"loss": loss, "head_loss": head_loss}

    def aggregate(self, server: Params, ids: Tensor, ups: Sized) -> Params:
        return tree.mean(ups.params, ups.count)

    def personalize(self, task: Task, client: Params, down: Params, batches: Batches) -> Params:
        return {**client, **down}

    def onboard(self, task: Task, newcomer: Newcomer, ids: Tensor, ups: Sized | None) -> Newcomer:
        return newcomer._replace(only=task.head_names & task.trainable or None)


def _times(batches: Batches, number: int) -> Batches:
    """The same minibatches over and over."""
    index, mask, key = (torch.cat([part] * number) for part in (batches.index, batches.mask, batches.key))
    return batches._replace(index=index, mask=mask, key=key)
