"""LG-FedAvg (Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
2020).

FedPer turned round: each client learns a representation (the body) of its own, and all share what works on top of it
(the head, `task.head_names`):

    body_i, head_i <- SGD on f_i(body_i, head_i), from head as received   (`shared_layers.local_update`; Algorithm 1)
    head           <- sum_i (n_i / n) head_i                              (`averaging.aggregate`; Algorithm 1)

Bodies start equal and are never sent, so a message is small, and clients may have different bodies if all end in the
same head. Each client deploys its own body with the shared head. A model that is nothing but a head makes this equal to
FedAvg; a model without a linear layer makes it equal to local training.

Deviations:
- The paper first runs FedAvg on the whole model and starts from what that gives; here all start from the initial model.
- A client that never took part deploys the initial body. A newcomer trains a body under the shared head, which stays
  as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from coterie.core.method import CountedParams, Method, Newcomer, Population
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.task import Task
from coterie.core.tree import Params
from coterie.parts import averaging, shared_layers


@dataclass(frozen=True)
class LGFedAvg(Method[Params, Params, Params, CountedParams]):
    mixes_models: ClassVar[str] = "heads"
    learns_from: ClassVar[str] = "all clients, through the head that they share; the body is its own"

    optimizer: Optimizer = SGD()

    init_server, dispatch, aggregate = averaging.init_head, averaging.dispatch, averaging.aggregate
    init_client, personalize = shared_layers.init_client, shared_layers.personalize
    local_update = shared_layers.local_update

    def cautions(self, task: Task, population: Population) -> list[str]:
        if not task.head_names:
            return ["the model has no head, so nothing is shared: name the layer with --head"]
        return []

    def onboard(self, task: Task, newcomer: Newcomer, ids: Tensor, ups: CountedParams | None) -> Newcomer:
        return newcomer._replace(only=task.trainable - task.head_names or None)
