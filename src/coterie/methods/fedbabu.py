"""FedBABU (Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022).

The head stays as it was initialised, the same for everybody, while the body is learned; then a client fine-tunes:

    phi_i   <- SGD on f_i(phi_i, h), the head h fixed               (`local_update`; Algorithm 1, client)
    phi     <- sum_i (n_i / n) phi_i                                (`aggregate`; Algorithm 1, server)
    theta_i <- SGD on f_i(phi, h) over `finetune_epochs` epochs     (`personalize`; the paper's fine-tuning)

`finetune` says what is fine-tuned: the whole model (default, the paper's), the head alone, or the body alone. The
fine-tuned model is never sent and never kept: it is made anew whenever it is evaluated or deployed, always on training
data. h is the initial model's head, so it need not be sent. A model without a linear layer makes FedBABU equal to
FedAvg with fine-tuning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from coterie.core.batches import Batches
from coterie.core.method import CountedParams, Info, Method, Population, body_cautions
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.search import Search
from coterie.core.task import Task
from coterie.core.training import train
from coterie.core.tree import Params
from coterie.parts import averaging


@dataclass(frozen=True)
class FedBABU(Method[Params, Params, Params, CountedParams]):
    learns_from: ClassVar[str] = "all clients, through the body that they share; the head is its own"

    not_meant_to_learn: ClassVar[dict[str, str]] = {
        "finetune = body": "under a head that nobody ever trained, a body needs more than the law's few steps"
    }

    optimizer: Optimizer = SGD()
    finetune_epochs: Annotated[int, Search(1, 10), Field(ge=0, description="epochs on own data before use")] = 5
    finetune: Annotated[Literal["all", "head", "body"], Field(description="what is fine-tuned before use")] = "all"

    init_server, dispatch, aggregate = averaging.init_body, averaging.dispatch, averaging.aggregate

    @property
    def personalize_epochs(self) -> int:
        return self.finetune_epochs

    def init_client(self, params: Params) -> Params:
        return params  # only its head h is used, which never changes

    def local_update(
        self, task: Task, client: Params, down: Params, batches: Batches
    ) -> tuple[Params, CountedParams, Info]:
        theta, loss = train(task, self.optimizer, {**client, **down}, batches, only=frozenset(down))
        return theta, CountedParams(task.sent({name: theta[name] for name in down}), batches.count), {"loss": loss}

    def personalize(self, task: Task, client: Params, down: Params, batches: Batches) -> Params:
        parts = {"all": None, "head": task.head_names, "body": frozenset(down)}
        return train(task, self.optimizer.unguarded, {**client, **down}, batches, only=parts[self.finetune])[0]

    def cautions(self, task: Task, population: Population) -> list[str]:
        return body_cautions(task)
