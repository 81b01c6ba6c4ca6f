"""Per-FedAvg, first order (Fallah et al., "Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach", NeurIPS 2020).

The method looks for a model w that one gradient step on a client's own data turns into a good model for that client:
min_w sum_i f_i(w - alpha grad f_i(w)). Each iteration takes two minibatches B1 and B2 of the client:

    g   = grad f_B2(w_i - alpha grad f_B1(w_i))                      (`_iteration`; Algorithm 1)
    w_i <- w_i - beta g                                              (`_iteration`; Algorithm 1)
    w   <- sum_i (n_i / n) w_i                                       (`aggregate`)
    theta_i = w - alpha grad f_B(w), `adapt_steps` times             (`personalize`)

This is the paper's first-order variant FO, which leaves out the factor I - alpha grad^2 f in front of g. The optimiser
takes the steps of w_i, so its lr is the paper's beta. Clients adapt on minibatches of their *training* data whenever
they are evaluated or deployed, never on test data. A client deploys theta_i (P); w is the global model (G).

Deviations:
- The second minibatch of an iteration is the first of the next one (`Batches.paired`), so that a round of R minibatches
  has R iterations.
- Clients are averaged in proportion to n_i; the paper averages uniformly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from coterie.core import tree
from coterie.core.batches import MIN_TOTAL_WEIGHT, Batch, Batches
from coterie.core.method import CountedParams, Info, Method
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.scan import scan
from coterie.core.search import Search
from coterie.core.task import Task
from coterie.core.training import gradient, train
from coterie.core.tree import Params
from coterie.parts import averaging


@dataclass(frozen=True)
class PerFedAvg(Method[Params, tuple[()], Params, CountedParams]):
    optimizer: Optimizer = SGD()
    alpha: Annotated[float, Search(1e-3, 3e-1), Field(gt=0, description="step size of a client's adaptation")] = 0.01
    adapt_steps: Annotated[int, Search(1, 10), Field(ge=0, description="steps on own training data before use")] = 1

    init_server, dispatch, aggregate = averaging.init_server, averaging.dispatch, averaging.aggregate
    init_client = averaging.init_no_state

    @property
    def personalize_epochs(self) -> int:
        return self.adapt_steps  # an epoch has at least one minibatch

    def local_update(
        self, task: Task, client: tuple[()], down: Params, batches: Batches
    ) -> tuple[tuple[()], CountedParams, Info]:
        zero = batches.mask.new_zeros(())
        start = (down, self.optimizer.init(task.split(down)[0]), zero, zero)
        w, _, total, seen = scan(partial(self._iteration, task), start, (), batches.paired())
        return (), CountedParams(task.sent(w), batches.count), {"loss": total / seen.clamp_min(MIN_TOTAL_WEIGHT)}

    def personalize(self, task: Task, client: tuple[()], down: Params, batches: Batches) -> Params:
        return train(task, SGD(self.alpha), down, batches.first_steps(self.adapt_steps))[0]

    def global_model(self, server: Params) -> Params:
        return server

    def _iteration(self, task: Task, carry: Any, aux: Any, batch: Batch) -> Any:
        """Do one pair of minibatches: a step of a scan."""
        w, state, total, seen = carry
        first, second = batch.halves()
        trained = task.split(w)[0]
        grads, _, rest = gradient(task, w, first)
        adapted = tree.map(lambda p, g: p - self.alpha * g, trained, grads)
        grads, loss, rest = gradient(task, {**adapted, **rest}, second)
        trained, state = self.optimizer.update(grads, state, trained)
        count = second.mask.sum()
        return {**trained, **rest}, state, total + loss * count, seen + count
