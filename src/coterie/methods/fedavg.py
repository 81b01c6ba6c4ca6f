"""FedAvg (McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017).

    w_i <- w - lr * grad f_i(w), repeated over the local minibatches    (`local_update`; Algorithm 1, ClientUpdate)
    w   <- sum_i (n_i / n) w_i                                         (`aggregate`; Algorithm 1, Server)

n_i is the client's number of training examples, and n is their sum over the clients of the round. Buffers (BatchNorm's
running statistics) are averaged like parameters; frozen weights are not sent. Every client deploys the same w.
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.core.batches import Batches
from coterie.core.method import CountedParams, Info, Method
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.task import Task
from coterie.core.training import train
from coterie.core.tree import Params
from coterie.parts import averaging


@dataclass(frozen=True)
class FedAvg(Method[Params, tuple[()], Params, CountedParams]):
    optimizer: Optimizer = SGD()

    init_server, dispatch, aggregate = averaging.init_server, averaging.dispatch, averaging.aggregate
    init_client = averaging.init_no_state

    def local_update(
        self, task: Task, client: tuple[()], down: Params, batches: Batches
    ) -> tuple[tuple[()], CountedParams, Info]:
        w, loss = train(task, self.optimizer, down, batches)
        return (), CountedParams(task.sent(w), batches.count), {"loss": loss}

    def personalize(self, task: Task, client: tuple[()], down: Params, batches: Batches) -> Params:
        return down
