"""Per-FedAvg, first order (Fallah et al., "Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach", NeurIPS 2020).

The model w is one that a gradient step on a client's own data turns into a good model: min_w sum_i f_i(w - alpha grad
f_i(w)). Each iteration takes two minibatches B1 and B2 of the client:

    g   = grad f_B2(w_i - alpha grad f_B1(w_i))                      (`_iteration`; Algorithm 1)
    w_i <- w_i - b g, by the optimiser, whose lr is the paper's beta
    w   <- sum_i (n_i / n) w_i                                       (`aggregate`)
    theta_i = w - alpha grad f_B(w), `adapt_steps` times             (`personalize`)

This is the paper's first-order variant FO: the factor I - alpha grad^2 f in front of g is left out. Clients adapt on
minibatches of their *training* data whenever they are evaluated or deployed, never on test data; G is w itself.
Deviations: the second minibatch of an iteration is the first of the next one (`Batches.pairs`), so that a round of R
minibatches has R iterations; clients are averaged in proportion to n_i, where the paper averages uniformly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from coterie import tree
from coterie.batches import LEAST, Batch, Batches
from coterie.local import SGD, Optimizer, gradient, train
from coterie.method import Info, Method, Population, Sized
from coterie.scan import scan
from coterie.task import Task
from coterie.tree import Params


@dataclass(frozen=True)
class PerFedAvg(Method[Params, tuple[()], Params, Sized]):
    optimizer: Optimizer = SGD()
    alpha: Annotated[float, Field(gt=0, description="step size of a client's adaptation")] = 0.01
    adapt_steps: Annotated[int, Field(ge=0, description="steps on own training data before use")] = 1

    @property
    def personalize_epochs(self) -> int:
        return self.adapt_steps  # an epoch has at least one minibatch

    def init_server(self, params: Params, population: Population) -> Params:
        return params

    def init_client(self, params: Params) -> tuple[()]:
        return ()

    def dispatch(self, server: Params, ids: Tensor, rng: torch.Generator) -> Params:
        return tree.broadcast(server, len(ids))

    def local_update(
        self, task: Task, client: tuple[()], down: Params, batches: Batches
    ) -> tuple[tuple[()], Sized, Info]:
        zero = batches.mask.new_zeros(())
        start = (down, self.optimizer.init(task.split(down)[0]), zero, zero)
        w, _, total, seen = scan(partial(self._iteration, task), start, (), batches.pairs())
        return (), Sized(w, batches.count), {"loss": total / seen.clamp_min(LEAST)}

    def aggregate(self, server: Params, ids: Tensor, ups: Sized) -> Params:
        return tree.mean(ups.params, ups.count)

    def personalize(self, task: Task, client: tuple[()], down: Params, batches: Batches) -> Params:
        return train(task, SGD(self.alpha), down, batches.first(self.adapt_steps))[0]

    def global_model(self, server: Params) -> Params:
        return server

    def _iteration(self, task: Task, carry: Any, aux: Any, batch: Batch) -> Any:
        w, state, total, seen = carry
        first, second = batch.halves()
        trained, count = task.split(w)[0], second.mask.sum()
        grads, _, rest = gradient(task, w, first)
        adapted = tree.map(lambda p, g: p - self.alpha * g, trained, grads)
        grads, loss, rest = gradient(task, {**adapted, **rest}, second)
        trained, state = self.optimizer.update(grads, state, trained)
        return {**trained, **rest}, state, total + loss * count, seen + count
