"""FedEM (Marfoq et al., "Federated Multi-Task Learning under a Mixture of Distributions", NeurIPS 2021).

Every client's data is a mixture of M = `components` distributions that all share; only the proportions pi_i differ. In
a round, with theta_m as received and l the loss of one example:

    q_m(x, y) ~ pi_im exp(-l(theta_m; x, y)),   sum_m q_m = 1       (`_iteration`; E-step)
    pi_im <- mean of q_m over the client's examples                 (`local_update`; M-step)
    theta_im <- SGD on  s_m mean q_m(x, y) l(theta_im; x, y)        (`_iteration`; M-step)
    theta_m  <- sum_i (n_i / n) theta_im                            (`aggregate`)

A client deploys the mixture sum_m pi_im p(y | x; theta_m). M = 1 is FedAvg (tested).

s_m changes no minimum of the M-step, but how far a few steps of SGD come. The paper has s_m = 1 (`m_step` = plain): a
component is then moved by its share of a client's examples, and M components that begin with a share of 1/M each learn
M times as slowly as FedAvg's model does with the same step size. By default (`scaled`), s_m = 1 / max(pi_im, 1/M),
with pi_im as it was before the round: a component with its fair share or more takes FedAvg's steps, and one with less
takes steps that shrink with its share, so that a client does not move a component that explains nothing of its data.

Details: q is that of the models as received throughout a round, computed in evaluation mode with each minibatch, so
that nothing has to be kept for every example. All examples that a client uses in a round count in pi_i, each with its
mask. The components begin as in `coterie.parts.components`, since equal ones would stay equal; pi_i begins uniform.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad_and_value, vmap

from coterie.core.batches import MIN_TOTAL_WEIGHT, Batch, Batches
from coterie.core.errors import CoterieError
from coterie.core.method import CountedParams, Info, Method, Population
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.scan import scan
from coterie.core.search import Search
from coterie.core.task import Task
from coterie.core.tree import Params
from coterie.parts import averaging
from coterie.parts.components import different_models
from coterie.parts.mixtures import Mixture, predict_mixture


class Round(NamedTuple):
    """What a round's steps read and do not change."""

    theta: Params  # [M, ...]; as received
    log_pi: Tensor  # [M]
    scale: Tensor  # [M]; s_m


@dataclass(frozen=True)
class FedEM(Method[Params, Tensor, Params, CountedParams]):
    learns_from: ClassVar[str] = "all clients, through models of the distributions that their data mix"
    exempt: ClassVar[dict[int, str]] = {9: "a client deploys a mixture of all components, none of them alone"}

    optimizer: Optimizer = SGD()
    components: Annotated[
        int, Search(2, 5), Field(ge=1, description="M, the number of distributions that data are mixed of")
    ] = 3

    m_step: Annotated[
        Literal["scaled", "plain"], Field(description="steps of a component: over its share, or in proportion to it")
    ] = "scaled"

    dispatch, aggregate = averaging.dispatch, averaging.aggregate

    def init_server(self, params: Params, population: Population) -> Params:
        if population.task is not None and population.task.joint:
            raise CoterieError(
                f"FedEM asks which model fits an example best, and in {population.task.target.words} an example has no "
                "loss of its own: choose task = 'survival', whose examples have"
            )
        return different_models(params, self.components, population.task)

    def init_client(self, params: Params) -> Tensor:
        return torch.full((self.components,), 1 / self.components)  # pi_i

    def local_update(
        self, task: Task, client: Tensor, down: Params, batches: Batches
    ) -> tuple[Tensor, CountedParams, Info]:
        fresh = vmap(self.optimizer.init)(task.split(down)[0])
        zero = batches.mask.new_zeros(())
        start = (down, fresh, torch.zeros_like(client), zero, zero)
        scale = 1 / client.clamp_min(1 / self.components) if self.m_step == "scaled" else torch.ones_like(client)
        given = Round(down, client.log(), scale)
        theta, _, q, total, seen = scan(partial(self._iteration, task), start, given, batches)
        seen = seen.clamp_min(MIN_TOTAL_WEIGHT)
        pi = (q / seen).clamp_min(torch.finfo(q.dtype).tiny)
        return pi / pi.sum(), CountedParams(task.sent(theta), batches.count), {"loss": total / seen}

    def personalize(self, task: Task, client: Tensor, down: Params, batches: Batches) -> Mixture:
        return Mixture(down, client)

    def predict(self, task: Task, view: Mixture, x: Tensor) -> Tensor:
        return predict_mixture(task, view, x)

    def _iteration(self, task: Task, carry: Any, given: Round, batch: Batch) -> Any:
        """Do one minibatch: a step of a scan."""
        theta, states, total_q, total, seen = carry
        losses = vmap(lambda model: task.losses(model, batch.x, batch.y))(given.theta)  # [M, batch]
        q = torch.softmax(given.log_pi[:, None] - losses, 0)
        count = batch.mask.sum()

        def component(model: Params, state: Any, q: Tensor, scale: Tensor) -> tuple[Params, Any, Tensor]:
            weighted = batch._replace(mask=q * batch.mask)
            share = weighted.mask.sum() / count.clamp_min(MIN_TOTAL_WEIGHT)
            trained, rest = task.split(model)

            def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
                loss, left = task.loss({**trained, **rest}, weighted)
                return scale * share * loss, (share * loss, left)

            grads, (_, (loss, left)) = grad_and_value(objective, has_aux=True)(trained)
            trained, state = self.optimizer.update(grads, state, trained)
            return {**trained, **left}, state, loss

        theta, states, parts = vmap(component)(theta, states, q, given.scale)
        return theta, states, total_q + (q * batch.mask).sum(1), total + parts.sum() * count, seen + count
