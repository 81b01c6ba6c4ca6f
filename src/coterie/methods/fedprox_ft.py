"""FedProx with fine-tuning: FedProx's global model, trained a little more on the client's own data before it is used.

    w_i     <- SGD on f_i(w_i) + (mu / 2) ||w_i - w||^2, from w         (`local_update`; FedProx, Algorithm 2)
    w       <- sum_i (n_i / n) w_i                                     (`aggregate`)
    theta_i <- SGD on f_i, over `finetune_epochs` epochs, from w       (`personalize`)

This is the baseline that FedAMP's paper calls FedProx-FT. The fine-tuned model has no pull. It is never sent and never
kept: it is made anew from the current w whenever it is evaluated or deployed, always on training data. mu is FedProx's,
`auto` included.
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
from coterie.core.training import quadratic_penalty, train
from coterie.core.tree import Params
from coterie.parts import averaging, pulls


@dataclass(frozen=True)
class FedProxFT(Method[Params, tuple[()], Params, CountedParams]):
    optimizer: Optimizer = SGD()
    mu: Annotated[
        pulls.Strength,
        Search(1e-3, 1e1),
        Field(description="strength of the pull to the global model; auto: a tenth of a round's way"),
    ] = "auto"
    finetune_epochs: Annotated[int, Search(1, 10), Field(ge=0, description="epochs on own data before use")] = 1

    init_server, dispatch, aggregate = averaging.init_server, averaging.dispatch, averaging.aggregate
    init_client, personalize = averaging.init_no_state, averaging.finetune

    def local_update(
        self, task: Task, client: tuple[()], down: Params, batches: Batches
    ) -> tuple[tuple[()], CountedParams, Info]:
        mu = pulls.strength_of(self.mu, self.optimizer, task.split(down)[0], batches)
        w, loss = train(task, self.optimizer, down, batches, quadratic_penalty, (down, mu))
        return (), CountedParams(task.sent(w), batches.count), {"loss": loss}

    @property
    def pull_option(self) -> str:
        return "mu"

    def global_model(self, server: Params) -> Params:
        return server

    @property
    def personalize_epochs(self) -> int:
        return self.finetune_epochs
