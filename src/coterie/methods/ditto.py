"""Ditto (Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021).

    w_i <- w - lr * grad f_i(w), over the local minibatches            (`local_update`; the global objective, by FedAvg)
    v_i <- v_i - lr (grad f_i(v_i) + lambda (v_i - w))                 (`local_update`; Algorithm 1), w as received
    w   <- sum_i (n_i / n) w_i                                         (`aggregate`)

v_i is kept from round to round; it starts from the w that the client receives when it first takes part. The second line
descends the paper's h_i(v; w) = f_i(v) + (lambda / 2) ||v - w||^2 over the same minibatches as the first, so a round
takes twice as many gradients as FedAvg's. w_i and v_i each have their own buffers. A client deploys v_i (P), or w if it
never took part; w is the global model (G).

Deviation: the paper averages the sampled clients uniformly; here, as in the public implementations, they are averaged
in proportion to n_i, so that w is exactly FedAvg's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.method import CountedParams, Info, Method
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.search import Search
from coterie.core.task import Task
from coterie.core.training import quadratic_penalty, train
from coterie.core.tree import Params
from coterie.parts import averaging


class Client(NamedTuple):
    v: Params
    rounds: Tensor  # []; rounds taken part in


@dataclass(frozen=True)
class Ditto(Method[Params, Client, Params, CountedParams]):
    optimizer: Optimizer = SGD()
    lam: Annotated[
        float, Search(1e-2, 1e1), Field(ge=0, description="lambda, strength of the pull to the global model")
    ] = 1.0

    init_server, dispatch, aggregate = averaging.init_server, averaging.dispatch, averaging.aggregate

    def init_client(self, params: Params) -> Client:
        return Client(params, torch.zeros((), dtype=torch.int64))

    def local_update(
        self, task: Task, client: Client, down: Params, batches: Batches
    ) -> tuple[Client, CountedParams, Info]:
        w, global_loss = train(task, self.optimizer, down, batches)
        anchor = (down, torch.as_tensor(self.lam))
        v, loss = train(task, self.optimizer.unguarded, _own_model(client, down), batches, quadratic_penalty, anchor)
        return (
            Client(v, client.rounds + 1),
            CountedParams(task.sent(w), batches.count),
            {"loss": loss, "global_loss": global_loss},
        )

    def personalize(self, task: Task, client: Client, down: Params, batches: Batches) -> Params:
        return _own_model(client, down)

    def global_model(self, server: Params) -> Params:
        return server

    @property
    def pull_option(self) -> str:
        return "lam"


def _own_model(client: Client, down: Params) -> Params:
    """Return v_i, or the received w if the client has not taken part before."""
    return tree.where(client.rounds > 0, client.v, down)
