"""Local training: every client trains alone. It is the reference that every other method has to beat.

    theta_i <- argmin f_i(theta)                                    (`local_update`; FedMAP eq. 1)

Nothing is sent in either direction. With the same rounds, local epochs and optimiser, local training takes exactly as
many gradient steps as FedAvg, which makes the comparison fair. Each client deploys theta_i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.core.batches import Batches
from coterie.core.method import Info, Method, Population
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.task import Task
from coterie.core.training import train
from coterie.core.tree import Params


@dataclass(frozen=True)
class Local(Method[tuple[()], Params, tuple[()], tuple[()]]):
    mixes_models: ClassVar[str] = "nothing"
    learns_from: ClassVar[str] = "nobody: it was trained on its own data alone"

    optimizer: Optimizer = SGD()

    def init_server(self, params: Params, population: Population) -> tuple[()]:
        return ()

    def init_client(self, params: Params) -> Params:
        return params

    def dispatch(self, server: tuple[()], ids: Tensor, rng: torch.Generator) -> tuple[()]:
        return ()

    def local_update(self, task: Task, client: Params, down: Any, batches: Batches) -> tuple[Params, tuple[()], Info]:
        theta, loss = train(task, self.optimizer, client, batches)
        return theta, (), {"loss": loss}

    def aggregate(self, server: tuple[()], ids: Tensor, ups: tuple[()]) -> tuple[()]:
        return ()

    def personalize(self, task: Task, client: Params, down: Any, batches: Batches) -> Params:
        return client
