"""FedProx (Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020).

    w_i <- argmin_theta  f_i(theta) + (mu / 2) ||theta - w||^2          (`local_update`; eq. 2), w as received
    w   <- sum_i (n_i / n) w_i                                         (`aggregate`)

Deviation: the paper samples clients in proportion to n_i and averages uniformly; here, as in the public
implementations, clients are sampled uniformly and averaged in proportion to n_i, so that mu = 0 is exactly FedAvg. The
proximal term covers trained parameters, never buffers. Every client deploys w.

mu is a number or `auto` (default): a pull that takes back a tenth of the way that a client goes in a round, however
many steps it takes and however long they are (`coterie.parts.pulls`). The paper chooses mu from 0.001, 0.01, 0.1 and 1
for each data set; a number is right for one schedule only, and 1 held the clients of longer rounds at their start.
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
class FedProx(Method[Params, tuple[()], Params, CountedParams]):
    optimizer: Optimizer = SGD()
    mu: Annotated[
        pulls.Strength,
        Search(1e-3, 1e1),
        Field(description="strength of the pull to the global model; auto: a tenth of a round's way"),
    ] = "auto"

    init_server, dispatch, aggregate = averaging.init_server, averaging.dispatch, averaging.aggregate
    init_client = averaging.init_no_state

    def local_update(
        self, task: Task, client: tuple[()], down: Params, batches: Batches
    ) -> tuple[tuple[()], CountedParams, Info]:
        mu = pulls.strength_of(self.mu, self.optimizer, task.split(down)[0], batches)
        w, loss = train(task, self.optimizer, down, batches, quadratic_penalty, (down, mu))
        return (), CountedParams(task.sent(w), batches.count), {"loss": loss}

    def personalize(self, task: Task, client: tuple[()], down: Params, batches: Batches) -> Params:
        return down

    @property
    def pull_option(self) -> str:
        return "mu"
