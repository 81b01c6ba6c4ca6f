"""FedPer (Arivazhagan et al., "Federated Learning with Personalization Layers", 2019).

A model consists of a base, which is shared, and personalisation layers, which are the client's own (here the head,
`task.head_names`):

    base_i, head_i <- SGD on f_i(base_i, head_i), from base            (`local_update`), both together
    base <- sum_i (n_i / n) base_i                                     (`aggregate`)

Heads start equal and are never sent. Each client deploys the shared base with its own head. A model that is nothing but
a head makes FedPer equal to local training; a model without a linear layer makes it equal to FedAvg. A newcomer trains
a head on the shared base, which stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.method import CountedParams, Info, Method, Newcomer, Population, body_cautions
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.task import Task
from coterie.core.training import train
from coterie.core.tree import Params


@dataclass(frozen=True)
class FedPer(Method[Params, Params, Params, CountedParams]):
    learns_from: ClassVar[str] = "all clients, through the body that they share; the head is its own"

    optimizer: Optimizer = SGD()

    def init_server(self, params: Params, population: Population) -> Params:
        head = population.task.head_names if population.task else frozenset()
        return {name: value for name, value in params.items() if name not in head}  # the base

    def init_client(self, params: Params) -> Params:
        return params  # only its head is used

    def dispatch(self, server: Params, ids: Tensor, rng: torch.Generator) -> Params:
        return tree.broadcast(server, len(ids))

    def local_update(
        self, task: Task, client: Params, down: Params, batches: Batches
    ) -> tuple[Params, CountedParams, Info]:
        theta, loss = train(task, self.optimizer, {**client, **down}, batches)
        base = task.sent({name: theta[name] for name in down})
        return theta, CountedParams(base, batches.count), {"loss": loss}

    def aggregate(self, server: Params, ids: Tensor, ups: CountedParams) -> Params:
        return {**server, **tree.mean(ups.params, ups.count)}

    def personalize(self, task: Task, client: Params, down: Params, batches: Batches) -> Params:
        return {**client, **down}

    def onboard(self, task: Task, newcomer: Newcomer, ids: Tensor, ups: CountedParams | None) -> Newcomer:
        return newcomer._replace(only=task.head_names & task.trainable or None)

    def cautions(self, task: Task, population: Population) -> list[str]:
        return body_cautions(task)
