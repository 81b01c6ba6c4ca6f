"""FedPer (Arivazhagan et al., "Federated Learning with Personalization Layers", 2019).

A model consists of a base, which is shared, and personalisation layers, which are the client's own (here the head,
`task.head_names`):

    base_i, head_i <- SGD on f_i(base_i, head_i), from base            (`shared_layers.local_update`), both together
    base <- sum_i (n_i / n) base_i                                     (`averaging.aggregate`)

Heads start equal and are never sent. Each client deploys the shared base with its own head. A model that is nothing but
a head makes FedPer equal to local training; a model without a linear layer makes it equal to FedAvg. A newcomer trains
a head on the shared base, which stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from coterie.core.method import CountedParams, Method, Newcomer, Population, body_cautions
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.task import Task
from coterie.core.tree import Params
from coterie.parts import averaging, shared_layers


@dataclass(frozen=True)
class FedPer(Method[Params, Params, Params, CountedParams]):
    learns_from: ClassVar[str] = "all clients, through the body that they share; the head is its own"

    optimizer: Optimizer = SGD()

    init_server, dispatch, aggregate = averaging.init_body, averaging.dispatch, averaging.aggregate
    init_client, personalize = shared_layers.init_client, shared_layers.personalize
    local_update = shared_layers.local_update

    def onboard(self, task: Task, newcomer: Newcomer, ids: Tensor, ups: CountedParams | None) -> Newcomer:
        return newcomer._replace(only=task.head_names & task.trainable or None)

    def cautions(self, task: Task, population: Population) -> list[str]:
        return body_cautions(task)
