"""FedAvg with fine-tuning: FedAvg's global model, trained a little more on the client's own data before it is used.

    w       as in FedAvg                                                (`local_update`, `aggregate`)
    theta_i <- w - lr * grad f_i(w), over `finetune_epochs` epochs      (`personalize`)

This is the baseline that FedeRiCo's paper calls FedAvg+ (there with one epoch). The fine-tuned model is never sent and
never kept: it is made anew from the current w whenever it is evaluated or deployed, always on training data. A deployed
model has therefore had `finetune_epochs` more epochs of gradient steps than one of local training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from coterie.core.batches import Batches
from coterie.core.method import CountedParams, Info, Method
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.search import Search
from coterie.core.task import Task
from coterie.core.training import train
from coterie.core.tree import Params
from coterie.parts import averaging


@dataclass(frozen=True)
class FedAvgFT(Method[Params, tuple[()], Params, CountedParams]):
    optimizer: Optimizer = SGD()
    finetune_epochs: Annotated[int, Search(1, 10), Field(ge=0, description="epochs on own data before use")] = 1

    init_server, dispatch, aggregate = averaging.init_server, averaging.dispatch, averaging.aggregate
    init_client, personalize = averaging.init_no_state, averaging.finetune

    def local_update(
        self, task: Task, client: tuple[()], down: Params, batches: Batches
    ) -> tuple[tuple[()], CountedParams, Info]:
        w, loss = train(task, self.optimizer, down, batches)
        return (), CountedParams(task.sent(w), batches.count), {"loss": loss}

    @property
    def personalize_epochs(self) -> int:
        return self.finetune_epochs
