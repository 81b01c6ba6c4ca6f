"""APFL (Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020).

Client i deploys a mixture of its own model v_i and the global one, vbar_i = alpha_i v_i + (1 - alpha_i) w. In a round
it starts at w_i = w as received, and each minibatch gives

    w_i     <- w_i - lr grad f_i(w_i)                                        (`_iteration`; Algorithm 1)
    v_i     <- v_i - lr alpha_i grad f_i(vbar_i)                             (`_iteration`; Algorithm 1)
    w       <- sum_i (n_i / n) w_i                                           (`aggregate`; Algorithm 1)

where vbar_i = alpha_i v_i + (1 - alpha_i) w_i, and grad_v f_i(vbar_i) = alpha_i grad f_i(vbar_i). With `adaptive`, the
round's first minibatch also moves the mixing weight down its own gradient, by the optimiser's lr, clipped to [0, 1]:

    alpha_i <- alpha_i - lr <v_i - w_i, grad f_i(vbar_i)>                    (`_iteration`; the paper's adaptive alpha)

A round takes two gradients a minibatch. A client deploys vbar_i with the current w (P); w is the global model (G).
alpha = 0, fixed, is FedAvg but for buffers, which are v_i's, and alpha = 1 is local training (both tested).

Details the paper leaves open: v_i starts from the w that the client receives when it first takes part. w_i and v_i have
an optimiser state each, made anew every round. Buffers of v_i are those that vbar_i's forward passes left, since v_i
itself never makes a prediction, and they are deployed as they are. Clients are averaged by n_i; the paper, uniformly.
The authors' program (FedTorch) also adds 0.02 alpha_i to alpha_i's gradient, which draws it to 0; the equation above
has no such term.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree
from coterie.core.batches import MIN_TOTAL_WEIGHT, Batch, Batches
from coterie.core.method import CountedParams, Info, Method
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.scan import scan
from coterie.core.task import Task
from coterie.core.training import gradient
from coterie.core.tree import Params
from coterie.parts import averaging


class Client(NamedTuple):
    v: Params
    alpha: Tensor  # []
    rounds: Tensor  # []; rounds taken part in


@dataclass(frozen=True)
class APFL(Method[Params, Client, Params, CountedParams]):
    exempt: ClassVar[dict[int, str]] = {9: "a client deploys a mixture of two models that it trained, neither alone"}

    optimizer: Optimizer = SGD()
    alpha: Annotated[float, Field(ge=0, le=1, description="weight of the own model in the mixture, at first")] = 0.5
    adaptive: Annotated[bool, Field(description="learn the weight by gradient descent")] = True

    init_server, dispatch, aggregate = averaging.init_server, averaging.dispatch, averaging.aggregate

    def init_client(self, params: Params) -> Client:
        return Client(params, torch.tensor(self.alpha), torch.zeros((), dtype=torch.int64))

    def local_update(
        self, task: Task, client: Client, down: Params, batches: Batches
    ) -> tuple[Client, CountedParams, Info]:
        v = tree.where(client.rounds > 0, client.v, down)
        zero = batches.mask.new_zeros(())
        fresh = self.optimizer.init(task.split(down)[0])
        start = (down, fresh, v, fresh, client.alpha, zero, zero)
        w, _, v, _, alpha, total, seen = scan(partial(self._iteration, task), start, (), batches)
        info = {"loss": total / seen.clamp_min(MIN_TOTAL_WEIGHT), "alpha": alpha}
        return Client(v, alpha, client.rounds + 1), CountedParams(task.sent(w), batches.count), info

    def personalize(self, task: Task, client: Client, down: Params, batches: Batches) -> Params:
        mixed = _mixture(task, client.v, down, client.alpha)
        return tree.where(client.rounds > 0, mixed, down)

    def global_model(self, server: Params) -> Params:
        return server

    def _iteration(self, task: Task, carry: Any, aux: Any, batch: Batch) -> Any:
        """Do one minibatch: a step of a scan."""
        w, w_state, v, v_state, alpha, total, seen = carry
        own_w, own_v = task.split(w)[0], task.split(v)[0]
        grads, loss, rest = gradient(task, _mixture(task, v, w, alpha), batch)
        new_v, v_state = self.optimizer.update(tree.map(lambda g: alpha * g, grads), v_state, own_v)
        v = {**rest, **new_v}
        if self.adaptive:
            step = self.optimizer.lr * tree.dot(tree.sub(own_v, own_w), grads)
            alpha = torch.where(seen > 0, alpha, (alpha - step).clamp(0, 1))
        grads, _, rest = gradient(task, w, batch)
        new_w, w_state = self.optimizer.update(grads, w_state, own_w)
        count = batch.mask.sum()
        return {**rest, **new_w}, w_state, v, v_state, alpha, total + loss * count, seen + count


def _mixture(task: Task, v: Params, w: Params, alpha: Tensor) -> Params:
    """Return alpha v + (1 - alpha) w for trained parameters, with the buffers of v."""
    own_v, rest = task.split(v)
    return {**rest, **tree.map(lambda a, b: alpha * a + (1 - alpha) * b, own_v, task.split(w)[0])}
