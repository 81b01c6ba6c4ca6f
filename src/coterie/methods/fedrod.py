"""FedROD (Chen and Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR
2022).

One body, two heads: the generic one is trained for a test set in which all classes are as frequent, by a balanced
risk, and averaged; the personal one is a correction that fits the client's own class frequencies, and stays:

    generic:   L_bsm = CE(G(z) + log n_i, y)                                  (`_iteration`; balanced softmax)
    personal:  L_i   = CE(stop(G(z)) + P_i(stop(z)), y)                       (`_iteration`; empirical risk)
    body, G   <- SGD on L_bsm,   P_i <- SGD on L_i                            (`local_update`)
    body, G   <- sum_i (n_i / n) (body_i, G_i)                                (`aggregate`)

z are the features, G and P_i linear heads of the same shape, n_i the client's number of examples of each class, and
`stop` lets no gradient through, so that the body learns from the balanced risk alone. A client deploys G + P_i on the
shared body (P): two linear heads add up to one, so its view is an ordinary model. The model with G alone is the global
model (G). P_i starts at 0: then the client deploys the generic model (tested).

Details: a class that the client does not have counts as one tenth of an example in log n_i. P_i starts at 0, not at
random; the paper's variant whose heads come from a hyper-network is not here. The head must be one linear layer, and
the last one: where it is not, `init_server` refuses. Frozen parameters of the head are frozen in both heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad, grad_and_value

from coterie.core import tree
from coterie.core.batches import MIN_TOTAL_WEIGHT, Batch, Batches
from coterie.core.errors import CoterieError
from coterie.core.method import CountedParams, Info, Method, Population
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.scan import scan
from coterie.core.search import Search
from coterie.core.task import Task
from coterie.core.tree import Params
from coterie.parts import averaging, class_moments

ABSENT = 0.1  # examples that a class counts as if the client has none


@dataclass(frozen=True)
class FedROD(Method[Params, Params, Params, CountedParams]):
    learns_from: ClassVar[str] = "all clients, through the body and the generic head; a correction of it is its own"

    exempt: ClassVar[dict[int, str]] = {9: "a client deploys its own head added to the generic one, neither alone"}

    optimizer: Optimizer = SGD()
    balance: Annotated[
        float, Search(1e-1, 4), Field(ge=0, description="times log n_i in the generic loss; 0 is plain training")
    ] = 1.0

    dispatch, aggregate = averaging.dispatch, averaging.aggregate

    def init_server(self, params: Params, population: Population) -> Params:
        class_moments.dimensions(population.task)  # refuses what has no classes, or no linear head
        if population.task is not None and population.task.head_is_last is False:
            raise CoterieError(
                f"FedROD adds a second head to the model's outputs, so that its head '{population.task.head_module}' "
                "must be its last layer, and something follows it: name the last layer with --head, or choose another "
                "--model"
            )
        return params

    def init_client(self, params: Params) -> Params:
        return tree.map(torch.zeros_like, params)  # P_i, of which only the head is used

    def local_update(
        self, task: Task, client: Params, down: Params, batches: Batches
    ) -> tuple[Params, CountedParams, Info]:
        sizes = class_moments.class_sizes(task, batches.epoch(0))
        prior = self.balance * sizes.clamp_min(ABSENT).log()
        own = {name: value for name, value in client.items() if name in task.head_names & task.trainable}
        zero = batches.mask.new_zeros(())
        start = (
            down, self.optimizer.init(task.split(down)[0]), own, self.optimizer.init(own), zero, zero,
        )  # fmt: skip
        w, _, own, _, total, seen = scan(partial(self._iteration, task), start, prior, batches)
        return (
            {**client, **own},
            CountedParams(task.sent(w), batches.count),
            {"loss": total / seen.clamp_min(MIN_TOTAL_WEIGHT)},
        )

    def personalize(self, task: Task, client: Params, down: Params, batches: Batches) -> Params:
        return {name: value + client[name] if name in task.head_names else value for name, value in down.items()}

    def global_model(self, server: Params) -> Params:
        return server

    def _iteration(self, task: Task, carry: Any, prior: Tensor, batch: Batch) -> Any:
        """Do one minibatch: a step of a scan."""
        w, w_state, own, own_state, total, seen = carry
        trained = task.split(w)[0]
        frozen = {name: torch.zeros_like(w[name]) for name in task.head_names}  # P_i is 0 where nothing is trained

        def generic(trained: Params) -> tuple[Tensor, tuple[Tensor, Tensor, Params]]:
            outputs, features, rest = task.outputs_and_features({**w, **trained}, batch)
            return task.batch_loss(outputs + prior, batch), (outputs.detach(), features.detach(), rest)

        def personal(own: Params) -> tuple[Tensor, Tensor]:
            loss = task.batch_loss(outputs + task.head({**frozen, **own}, features), batch)
            return loss, loss

        grads, (_, (outputs, features, rest)) = grad_and_value(generic, has_aux=True)(trained)
        own_grads, loss = grad(personal, has_aux=True)(own)
        trained, w_state = self.optimizer.update(grads, w_state, trained)
        own, own_state = self.optimizer.update(own_grads, own_state, own)
        count = batch.mask.sum()
        return {**w, **rest, **trained}, w_state, own, own_state, total + loss * count, seen + count
