"""pFedMe (Dinh et al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020).

In a round, client i starts from w_i = w as received. With K = `prox_steps` and eta = `outer_lr`, each minibatch B gives

    theta_i <- argmin_theta  f_B(theta) + (lambda / 2) ||theta - w_i||^2     (`_iteration`; Algorithm 1), K steps
    w_i     <- w_i - eta lambda (w_i - theta_i)                              (`_iteration`; Algorithm 1)
    w       <- (1 - beta) w + beta sum_i p_i w_i                             (`aggregate`; Algorithm 1)

The optimiser takes the K steps, so its lr is the paper's inner step size; its state begins anew with each minibatch.
eta is a number or `auto` (default): the one with which w_i moves as far as one optimiser step on f_B would take it
(`training.envelope_step`), whatever lr, lambda and K are. A fixed eta = 0.01, the paper's, left w far behind clients
that train alone wherever lr is larger. For the paper's lr 0.01, lambda 15 and K 5, `auto` is 0.018.
The second line is a gradient step on the Moreau envelope of f_B (tested). Buffers follow theta_i and are averaged,
never extrapolated. A client deploys theta_i (P), or w if it never took part; w is the global model (G).

Where the paper leaves something open, there are options:
- `start` says where the K steps begin: `w` (default) at w_i, as in pFedBreD's comparison; `theta-in-round` at the
  theta_i of the minibatch before, and at w at the start of a round, as in the authors' code; `theta` at the last
  theta_i, from whichever round it is.
- `weighting` says what p_i is: n_i / n (default, the authors' code) or uniform (the paper).
- The authors' code adds 0.001 theta to the gradient, which is `weight_decay = 0.001` of SGD.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree
from coterie.core.batches import MIN_TOTAL_WEIGHT, Batch, Batches
from coterie.core.method import Info, Method, TrainedAndBuffers
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.privacy import lot_of
from coterie.core.scan import scan
from coterie.core.search import UNSEARCHED, Search
from coterie.core.task import Task
from coterie.core.training import envelope_step, proximal_steps
from coterie.core.tree import Params
from coterie.parts import averaging

Positive = Annotated[float, Field(gt=0)]


class Client(NamedTuple):
    theta: Params
    rounds: Tensor  # []; rounds taken part in


@dataclass(frozen=True)
class PFedMe(Method[Params, Client, Params, TrainedAndBuffers]):
    optimizer: Optimizer = SGD(0.01)
    lam: Annotated[float, Search(1, 100), Field(gt=0, description="lambda, strength of the pull of theta to w")] = 15.0
    prox_steps: Annotated[int, Field(ge=1, description="K, steps on one minibatch to find theta")] = 5
    outer_lr: Annotated[
        Literal["auto"] | Positive, Field(description="eta, step size of w; auto: w moves by one optimiser step")
    ] = "auto"
    beta: Annotated[float, Field(gt=0, description="relaxation of the server; above 1 it extrapolates")] = 1.0
    start: Annotated[
        Literal["w", "theta-in-round", "theta"], UNSEARCHED, Field(description="where the K steps of a minibatch begin")
    ] = "w"
    weighting: Annotated[Literal["samples", "uniform"], UNSEARCHED, Field(description="what a client weighs in w")] = (
        "samples"
    )

    init_server, dispatch = averaging.init_server, averaging.dispatch

    def init_client(self, params: Params) -> Client:
        return Client(params, torch.zeros((), dtype=torch.int64))

    def local_update(
        self, task: Task, client: Client, down: Params, batches: Batches
    ) -> tuple[Client, TrainedAndBuffers, Info]:
        theta = _own_theta(client, down) if self.start == "theta" else down
        zero = batches.mask.new_zeros(())
        lot = lot_of(self.optimizer, batches)
        w, theta, total, seen = scan(partial(self._iteration, task), (down, theta, zero, zero), lot, batches)
        loss = total / seen.clamp_min(MIN_TOTAL_WEIGHT)
        weight = batches.count if self.weighting == "samples" else torch.ones_like(batches.count)
        return Client(theta, client.rounds + 1), TrainedAndBuffers(*task.split(task.sent(w)), weight), {"loss": loss}

    def aggregate(self, server: Params, ids: Tensor, ups: TrainedAndBuffers) -> Params:
        weights = ups.count if self.weighting == "samples" else torch.ones_like(ups.count)
        return ups.relaxed_mean(server, weights, self.beta)

    def personalize(self, task: Task, client: Client, down: Params, batches: Batches) -> Params:
        return _own_theta(client, down)

    def global_model(self, server: Params) -> Params:
        return server

    @property
    def pull_option(self) -> str:
        return "lam"

    def _iteration(self, task: Task, carry: Any, lot: Any, batch: Batch) -> Any:
        """Do one minibatch: a step of a scan."""
        w, theta, total, seen = carry
        centre = task.split(w)[0]
        begin = w if self.start == "w" else theta
        theta, loss = proximal_steps(
            task, self.optimizer, begin, batch, self._penalty_gradient, centre, self.prox_steps, lot
        )
        eta = envelope_step(self.optimizer, self.lam, self.prox_steps) if self.outer_lr == "auto" else self.outer_lr
        moved = {name: value - eta * (self.lam * (value - theta[name])) for name, value in centre.items()}
        count = batch.mask.sum()
        return {**theta, **moved}, theta, total + loss * count, seen + count

    def _penalty_gradient(self, theta: Params, w: Params) -> Params:
        """Return the gradient of (lambda / 2) ||theta - w||^2 in theta."""
        return tree.map(lambda t, c: self.lam * (t - c), theta, w)


def _own_theta(client: Client, down: Params) -> Params:
    """Return theta_i, or the received w if the client has not taken part before."""
    return tree.where(client.rounds > 0, client.theta, down)
