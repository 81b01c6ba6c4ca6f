"""FedRep (Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021).

A model consists of a representation phi (the body), which is shared, and a head h_i, which is the client's own
(`task.head_names`):

    h_i   <- h_i - lr * grad_h f_i(h_i, phi),          phi fixed, as received           (`local_update`)
    phi_i <- phi_i - lr * grad_phi f_i(h_i, phi_i),    h_i fixed, as just trained       (`local_update`)
    phi   <- sum_i (n_i / n) phi_i                                                      (`aggregate`)

The head goes `head_epochs` times through the round's minibatches, and then the body goes `body_epochs` times through
them, so both are trained whatever the number of local epochs or steps is. A round thus takes head_epochs + body_epochs
times as many steps as FedAvg's. The optimiser starts anew for each phase, and the buffers of the fixed part stay fixed.

Deviation: phi_i are averaged in proportion to n_i, as in the public implementations; the paper, whose clients are of
equal size, averages uniformly. Each client deploys the shared body with its own head. A newcomer trains a head on the
shared body, which stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from coterie.core.batches import Batches
from coterie.core.method import CountedParams, Info, Method, Newcomer, Population, body_cautions
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.search import Search
from coterie.core.task import Task
from coterie.core.training import train
from coterie.core.tree import Params
from coterie.parts import averaging, shared_layers


@dataclass(frozen=True)
class FedRep(Method[Params, Params, Params, CountedParams]):
    learns_from: ClassVar[str] = "all clients, through the body that they share; the head is its own"

    optimizer: Optimizer = SGD()
    head_epochs: Annotated[
        int, Search(1, 5), Field(ge=1, description="times the head goes through the round's minibatches")
    ] = 1
    body_epochs: Annotated[int, Field(ge=1, description="times the body goes through them, after the head")] = 1

    init_server, dispatch, aggregate = averaging.init_body, averaging.dispatch, averaging.aggregate
    init_client, personalize = shared_layers.init_client, shared_layers.personalize

    def local_update(
        self, task: Task, client: Params, down: Params, batches: Batches
    ) -> tuple[Params, CountedParams, Info]:
        start = {**client, **down}
        head_batches, body_batches = batches.repeated(self.head_epochs), batches.repeated(self.body_epochs)
        theta, head_loss = train(task, self.optimizer, start, head_batches, only=task.head_names)
        theta, loss = train(task, self.optimizer, theta, body_batches, only=frozenset(down))
        phi = task.sent({name: theta[name] for name in down})
        return theta, CountedParams(phi, batches.count), {"loss": loss, "head_loss": head_loss}

    def onboard(self, task: Task, newcomer: Newcomer, ids: Tensor, ups: CountedParams | None) -> Newcomer:
        return newcomer._replace(only=task.head_names & task.trainable or None)

    def cautions(self, task: Task, population: Population) -> list[str]:
        return body_cautions(task)
