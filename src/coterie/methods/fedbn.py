"""FedBN (Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021).

    w_i <- w_i - lr * grad f_i(w_i), from w and the own normalisation  (`shared_layers.local_update`; Algorithm 1)
    every layer except normalisation:  w <- sum_i (n_i / n) w_i        (`averaging.aggregate`)

Each client trains and deploys the shared layers with its own normalisation layers (affine parameters and running
statistics), which are never sent: they are in no message, and not in the server's state. They are found by module type,
so an `nn.Sequential` model is handled too. A model without such layers makes FedBN equal to FedAvg.

A newcomer begins with the initial model's normalisation layers and trains these alone, on the shared layers as they
are; its running statistics become those of its own data on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from coterie.core.method import CountedParams, Method, Newcomer, Population
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.task import Task
from coterie.core.tree import Params
from coterie.parts import averaging, shared_layers


@dataclass(frozen=True)
class FedBN(Method[Params, Params, Params, CountedParams]):
    learns_from: ClassVar[str] = "all clients, but for the normalisation layers, which are its own"

    optimizer: Optimizer = SGD()

    dispatch, aggregate = averaging.dispatch, averaging.aggregate
    init_client, personalize = shared_layers.init_client, shared_layers.personalize
    local_update = shared_layers.local_update

    def init_server(self, params: Params, population: Population) -> Params:
        norm = population.task.norm_names if population.task else frozenset()
        return {name: value for name, value in params.items() if name not in norm}  # the shared layers

    def onboard(self, task: Task, newcomer: Newcomer, ids: Tensor, ups: CountedParams | None) -> Newcomer:
        return newcomer._replace(only=task.norm_names & task.trainable or None)

    def cautions(self, task: Task, population: Population) -> list[str]:
        if task.norm_names:
            return []
        return ["the model has no normalisation layers, so FedBN is FedAvg: choose a --model that has, such as cnn-bn"]
