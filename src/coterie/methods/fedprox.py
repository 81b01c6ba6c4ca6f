"""FedProx (Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020).

    w_i <- argmin_theta  f_i(theta) + (mu / 2) ||theta - w||^2          (`local_update`; eq. 2), w as received
    w   <- sum_i (n_i / n) w_i                                         (`aggregate`)

Deviation: the paper samples clients in proportion to n_i and averages uniformly; here, as in the public
implementations, clients are sampled uniformly and averaged in proportion to n_i, so that mu = 0 is exactly FedAvg. The
proximal term covers trained parameters, never buffers. Every client deploys w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.method import CountedParams, Info, Method, Population
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.search import Search
from coterie.core.task import Task
from coterie.core.training import quadratic_penalty, train
from coterie.core.tree import Params


@dataclass(frozen=True)
class FedProx(Method[Params, tuple[()], Params, CountedParams]):
    optimizer: Optimizer = SGD()
    mu: Annotated[float, Search(1e-3, 1e1), Field(ge=0, description="strength of the pull to the global model")] = 1.0

    def init_server(self, params: Params, population: Population) -> Params:
        return params

    def init_client(self, params: Params) -> tuple[()]:
        return ()

    def dispatch(self, server: Params, ids: Tensor, rng: torch.Generator) -> Params:
        return tree.broadcast(server, len(ids))

    def local_update(
        self, task: Task, client: tuple[()], down: Params, batches: Batches
    ) -> tuple[tuple[()], CountedParams, Info]:
        anchor = (down, torch.tensor(self.mu))
        w, loss = train(task, self.optimizer, down, batches, quadratic_penalty, anchor)
        return (), CountedParams(task.sent(w), batches.count), {"loss": loss}

    def aggregate(self, server: Params, ids: Tensor, ups: CountedParams) -> Params:
        return {**server, **tree.mean(ups.params, ups.count)}

    def personalize(self, task: Task, client: tuple[()], down: Params, batches: Batches) -> Params:
        return down

    @property
    def pull_option(self) -> str:
        return "mu"
