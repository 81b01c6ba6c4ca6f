"""Ditto (Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021).

    w_i <- w - lr * grad f_i(w), over the local minibatches            (`local_update`; the global objective, by FedAvg)
    v_i <- v_i - lr (grad f_i(v_i) + lambda (v_i - w))                 (`local_update`; Algorithm 1), w as received
    w   <- sum_i (n_i / n) w_i                                         (`aggregate`)

v_i is kept from round to round; it starts from the w that the client receives when it first takes part. Each client
deploys v_i (P), and w where it never took part; w is the global model (G). The second line descends the paper's
h_i(v; w) = f_i(v) + (lambda / 2) ||v - w||^2 over the same minibatches as the first, so a round costs twice as many
gradients as FedAvg's. Deviation: the paper averages the sampled clients uniformly; here, as in the public
implementations, in proportion to n_i, so that w is FedAvg's exactly. Buffers of w_i and v_i go with each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie import tree
from coterie.batches import Batches
from coterie.local import SGD, Optimizer, quadratic, train
from coterie.method import Info, Method, Population, Sized
from coterie.task import Task
from coterie.tree import Params


class Client(NamedTuple):
    v: Params
    rounds: Tensor  # []; rounds taken part in


@dataclass(frozen=True)
class Ditto(Method[Params, Client, Params, Sized]):
    optimizer: Optimizer = SGD()
    lam: Annotated[float, Field(ge=0, description="lambda, strength of the pull to the global model")] = 1.0

    def init_server(self, params: Params, population: Population) -> Params:
        return params

    def init_client(self, params: Params) -> Client:
        return Client(params, torch.zeros((), dtype=torch.int64))

    def dispatch(self, server: Params, ids: Tensor, rng: torch.Generator) -> Params:
        return tree.broadcast(server, len(ids))

    def local_update(self, task: Task, client: Client, down: Params, batches: Batches) -> tuple[Client, Sized, Info]:
        w, global_loss = train(task, self.optimizer, down, batches)
        anchor = (down, torch.tensor(self.lam))
        v, loss = train(task, self.optimizer, _own(client, down), batches, quadratic, anchor)
        return Client(v, client.rounds + 1), Sized(w, batches.count), {"loss": loss, "global_loss": global_loss}

    def aggregate(self, server: Params, ids: Tensor, ups: Sized) -> Params:
        return tree.mean(ups.params, ups.count)

    def personalize(self, task: Task, client: Client, down: Params, batches: Batches) -> Params:
        return _own(client, down)

    def global_model(self, server: Params) -> Params:
        return server


def _own(client: Client, down: Params) -> Params:
    return tree.where(client.rounds > 0, client.v, down)
