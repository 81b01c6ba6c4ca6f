"""Local training: every client alone, the reference that every other method has to beat.

    theta_i <- argmin f_i(theta)                                    (`local_update`; FedMAP eq. 1)

Nothing is sent in either direction. With the same rounds, local epochs and optimiser it takes exactly as many gradient
steps as a federated method, which makes it the honest comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.batches import Batches
from coterie.local import SGD, Optimizer, train
from coterie.method import Info, Method, Population
from coterie.task import Task
from coterie.tree import Params


@dataclass(frozen=True)
class Local(Method[tuple[()], Params, tuple[()], tuple[()]]):
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
