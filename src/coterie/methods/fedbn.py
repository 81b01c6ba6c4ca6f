"""FedBN (Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021).

    w_i <- w_i - lr * grad f_i(w_i)                                    (`local_update`; Algorithm 1)
    every layer except normalisation:  w <- sum_i (n_i / n) w_i        (`aggregate`)

Normalisation layers (affine parameters and running statistics) stay with the client: they are never sent. They are
found by module type, so an `nn.Sequential` model is handled too; a model without such layers makes FedBN equal FedAvg.
Each client deploys the shared layers with its own normalisation. A newcomer's begins as the mean of the others'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie import tree
from coterie.batches import Batches
from coterie.local import SGD, Optimizer, train
from coterie.method import Info, Method, Newcomer, Population, Sized
from coterie.task import Task
from coterie.tree import Params


@dataclass(frozen=True)
class FedBN(Method[Params, Params, Params, Sized]):
    learns_from: ClassVar[str] = "all clients, but for the normalisation layers, which are its own"

    optimizer: Optimizer = SGD()

    def init_server(self, params: Params, population: Population) -> Params:
        return params

    def init_client(self, params: Params) -> Params:
        return params

    def dispatch(self, server: Params, ids: Tensor, rng: torch.Generator) -> Params:
        return tree.broadcast(server, len(ids))

    def local_update(self, task: Task, client: Params, down: Params, batches: Batches) -> tuple[Params, Sized, Info]:
        w, loss = train(task, self.optimizer, _own_norm(task, client, down), batches)
        return w, Sized(w, batches.count), {"loss": loss}

    def aggregate(self, server: Params, ids: Tensor, ups: Sized) -> Params:
        return tree.mean(ups.params, ups.count)

    def personalize(self, task: Task, client: Params, down: Params, batches: Batches) -> Params:
        return _own_norm(task, client, down)

    def onboard(self, task: Task, newcomer: Newcomer, ids: Tensor, ups: Sized | None) -> Newcomer:
        return newcomer._replace(params=newcomer.server)


def _own_norm(task: Task, client: Params, down: Params) -> Params:
    return {name: client[name] if name in task.norm_names else down[name] for name in down}
