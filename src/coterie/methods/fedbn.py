"""FedBN (Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021).

    w_i <- w_i - lr * grad f_i(w_i), from w and the own normalisation  (`local_update`; Algorithm 1)
    every layer except normalisation:  w <- sum_i (n_i / n) w_i        (`aggregate`)

Each client trains and deploys the shared layers with its own normalisation layers (affine parameters and running
statistics), and ignores those it receives. Deviation: normalisation layers are sent and averaged too, like all other
layers; that average is used only as the start of a newcomer's. They are found by module type, so an `nn.Sequential`
model is handled too. A model without such layers makes FedBN equal to FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.method import CountedParams, Info, Method, Newcomer, Population
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.task import Task
from coterie.core.training import train
from coterie.core.tree import Params


@dataclass(frozen=True)
class FedBN(Method[Params, Params, Params, CountedParams]):
    learns_from: ClassVar[str] = "all clients, but for the normalisation layers, which are its own"

    optimizer: Optimizer = SGD()

    def init_server(self, params: Params, population: Population) -> Params:
        return params

    def init_client(self, params: Params) -> Params:
        return params

    def dispatch(self, server: Params, ids: Tensor, rng: torch.Generator) -> Params:
        return tree.broadcast(server, len(ids))

    def local_update(
        self, task: Task, client: Params, down: Params, batches: Batches
    ) -> tuple[Params, CountedParams, Info]:
        w, loss = train(task, self.optimizer, _with_own_norm(task, client, down), batches)
        return w, CountedParams(w, batches.count), {"loss": loss}

    def aggregate(self, server: Params, ids: Tensor, ups: CountedParams) -> Params:
        return tree.mean(ups.params, ups.count)

    def personalize(self, task: Task, client: Params, down: Params, batches: Batches) -> Params:
        return _with_own_norm(task, client, down)

    def onboard(self, task: Task, newcomer: Newcomer, ids: Tensor, ups: CountedParams | None) -> Newcomer:
        return newcomer._replace(params=newcomer.server)

    def cautions(self, task: Task, population: Population) -> list[str]:
        if task.norm_names:
            return []
        return ["the model has no normalisation layers, so FedBN is FedAvg: choose a --model that has, such as cnn-bn"]


def _with_own_norm(task: Task, client: Params, down: Params) -> Params:
    """Return the received model with the client's normalisation layers in place of its own."""
    return {name: client[name] if name in task.norm_names else down[name] for name in down}
