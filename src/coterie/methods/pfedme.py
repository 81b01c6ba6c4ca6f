"""pFedMe (Dinh et al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020).

Each minibatch B of a round, from w_i = w as received, with K = `prox_steps` and eta = `outer_lr`:

    theta_i <- argmin_theta  f_B(theta) + (lambda / 2) ||theta - w_i||^2     (`_iteration`; Algorithm 1), K steps
    w_i     <- w_i - eta lambda (w_i - theta_i)                              (`_iteration`; Algorithm 1)
    w       <- (1 - beta) w + beta sum_i p_i w_i                             (`aggregate`; Algorithm 1)

The optimiser takes the K steps, so its lr is the paper's inner step size. The second line is a gradient step on the
Moreau envelope of f_B (tested). A client deploys theta_i (P), and w where it never took part; G is w.

What the paper leaves open, all options:
- `start`: where the K steps begin. `w` (default) is w_i, as in pFedBreD's comparison; `theta-in-round` is the theta_i
  of the minibatch before and w at the start of a round, as in the authors' code; `theta` is the last theta_i, ever.
- `weighting`: p_i is n_i / n (default, the authors' code) or uniform (the paper).
- The authors' code adds 0.001 theta to the gradient: that is `weight_decay = 0.001` of SGD.
The optimiser's state is made anew for each minibatch. Buffers follow theta_i and are averaged, never extrapolated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie import tree
from coterie.batches import LEAST, Batch, Batches
from coterie.local import SGD, Optimizer, proximal
from coterie.method import Info, Method, Parts, Population
from coterie.scan import scan
from coterie.task import Task
from coterie.tree import Params


class Client(NamedTuple):
    theta: Params
    rounds: Tensor  # []; rounds taken part in


@dataclass(frozen=True)
class PFedMe(Method[Params, Client, Params, Parts]):
    optimizer: Optimizer = SGD(0.01)
    lam: Annotated[float, Field(gt=0, description="lambda, strength of the pull of theta to w")] = 15.0
    prox_steps: Annotated[int, Field(ge=1, description="K, steps on one minibatch to find theta")] = 5
    outer_lr: Annotated[float, Field(gt=0, description="eta, step size of w")] = 0.01
    beta: Annotated[float, Field(gt=0, description="relaxation of the server; above 1 it extrapolates")] = 1.0
    start: Annotated[
        Literal["w", "theta-in-round", "theta"], Field(description="where the K steps of a minibatch begin")
    ] = "w"
    weighting: Annotated[Literal["samples", "uniform"], Field(description="what a client weighs in w")] = "samples"

    def init_server(self, params: Params, population: Population) -> Params:
        return params

    def init_client(self, params: Params) -> Client:
        return Client(params, torch.zeros((), dtype=torch.int64))

    def dispatch(self, server: Params, ids: Tensor, rng: torch.Generator) -> Params:
        return tree.broadcast(server, len(ids))

    def local_update(self, task: Task, client: Client, down: Params, batches: Batches) -> tuple[Client, Parts, Info]:
        theta = self._theta(client, down) if self.start == "theta" else down
        zero = batches.mask.new_zeros(())
        w, theta, total, seen = scan(partial(self._iteration, task), (down, theta, zero, zero), (), batches)
        loss = total / seen.clamp_min(LEAST)
        return Client(theta, client.rounds + 1), Parts(*task.split(w), batches.count), {"loss": loss}

    def aggregate(self, server: Params, ids: Tensor, ups: Parts) -> Params:
        weights = ups.count if self.weighting == "samples" else torch.ones_like(ups.count)
        return ups.relax(server, weights, self.beta)

    def personalize(self, task: Task, client: Client, down: Params, batches: Batches) -> Params:
        return self._theta(client, down)

    def global_model(self, server: Params) -> Params:
        return server

    def _theta(self, client: Client, down: Params) -> Params:
        return tree.where(client.rounds > 0, client.theta, down)

    def _iteration(self, task: Task, carry: Any, aux: Any, batch: Batch) -> Any:
        w, theta, total, seen = carry
        own, count = task.split(w)[0], batch.mask.sum()
        begin = w if self.start == "w" else theta
        theta, loss = proximal(task, self.optimizer, begin, batch, self._pull, own, self.prox_steps)
        moved = {name: value - self.outer_lr * (self.lam * (value - theta[name])) for name, value in own.items()}
        return {**theta, **moved}, theta, total + loss * count, seen + count

    def _pull(self, theta: Params, w: Params) -> Params:
        """Gradient of (lambda / 2) ||theta - w||^2."""
        return tree.map(lambda t, c: self.lam * (t - c), theta, w)
