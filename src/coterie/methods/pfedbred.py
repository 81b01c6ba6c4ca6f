"""pFedBreD (Shi et al., "PRIOR: Personalized Prior for Reactivating the Information Overlooked in FL", NeurIPS 2023).

The global model w becomes a prior of the client's own, with mean mu_i(w), before the client infers. On each minibatch:

    mu      = w_i - eta grad Phi_i(w_i)                                           (`_prior_mean`; eqs 11 and 14)
    theta_i <- Dprox f_i(mu) = argmin_theta  f_i(theta) + lambda D_g*(theta, mu)  (`_iteration`; eq. 2, by K steps)
    w_i     <- w_i - alpha_m lambda D mu(w_i) grad^2 g*(mu) (mu - theta_i)        (`_iteration`; eq. 13)
    w       <- (1 - beta) w + beta sum_i p_i w_i                                  (`aggregate`; Algorithm 1, line 12)

`jacobian` says what D mu is. `identity` (default) is first order, as the paper's and the authors' implementations of
eq. 14 are. `exact` is eq. 13 to the letter: I - eta_alpha H for lg and mh, with the Hessian H of the loss, by a
vector-Jacobian product. It is second order and about twice as dear, and the step of w_i is then down the gradient of
the envelope F_i(w) = min_theta f_i(theta) + lambda D_g*(theta, mu_i(w)) (tested).

`strategy` chooses Phi_i: `lg` takes f_i; `meg` takes the memorised envelope gradient m_i - theta_i, where m_i is the
client's w_i at the end of its last round; `mh` takes both; `none` takes nothing, which is pFedMe (tested). The
optimiser takes the K steps, so its lr is the paper's alpha. Buffers follow theta_i and are averaged, never
extrapolated. A client deploys theta_i, or w if it never took part, after `finetune` more steps on f_i (P); w is the
global model (G).

alpha_m is a number or `auto` (default): the one with which w_i moves as far as one optimiser step on f_i would take it
(`training.envelope_step`). eta_alpha, a step down the loss, is a number or `auto` (default): the optimiser's lr if that
is SGD, as in the paper, where both are 0.01, and else 0.01. Steps that did not follow lr left w far behind.

`variant` = `paper` is the above: the K steps begin at the last theta_i, and p_i is uniform. `authors` (default) is the
published code, whose `mh` is what reaches the paper's tables (eq. 14 to the letter does not beat pFedMe). It differs as
follows:
  (i) mh's loss gradient is Per-FedAvg's, w' = w - eta_alpha grad f_B2(w - eta_alpha grad f_B1(w));
 (ii) it is written into w_i before anything else;
(iii) it takes two minibatches (`Batches.paired`);
 (iv) lg's step was 0.05, which is `eta_alpha` here, and 0.01 in the paper;
  (v) the K steps begin at w' (mh), w_i (meg, none) or mu (lg), and not at the last theta_i;
 (vi) p_i is n_i / n, not uniform;
(vii) m_i and theta_i begin as the model first received (here in both variants).

Deviations:
- The published code trains all clients in every round and averages some of them. Here only those train, and the memory
  of the others ages.
- The tables' "+AM" is taken to be `beta` = 2, and "+FT" to be `finetune`; neither is defined in public.
- Generators other than the squared norm (`coterie.parts.bregman`) are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.func import vjp

from coterie.core import tree
from coterie.core.batches import MIN_TOTAL_WEIGHT, Batch, Batches
from coterie.core.method import Info, Method, Population, TrainedAndBuffers
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.scan import scan
from coterie.core.search import UNSEARCHED, Search
from coterie.core.task import Task
from coterie.core.training import envelope_step, gradient, proximal_steps, train
from coterie.core.tree import Params
from coterie.parts.bregman import Generator, make_generator

Positive = Annotated[float, Field(gt=0)]
PAPER_ETA_ALPHA = 0.01


class Client(NamedTuple):
    theta: Params
    memory: Params  # m_i, the client's w_i at the end of its last round
    rounds: Tensor  # []; rounds taken part in


@dataclass(frozen=True)
class PFedBreD(Method[Params, Client, Params, TrainedAndBuffers]):
    optimizer: Optimizer = SGD(0.01)
    strategy: Annotated[
        Literal["mh", "meg", "lg", "none"], UNSEARCHED, Field(description="what makes the prior personal")
    ] = "mh"
    variant: Annotated[
        Literal["authors", "paper"], UNSEARCHED, Field(description="published code or the paper's text")
    ] = "authors"
    jacobian: Annotated[
        Literal["identity", "exact"], UNSEARCHED, Field(description="D mu of eq. 13: first order, or second order")
    ] = "identity"
    generator: Annotated[Generator, UNSEARCHED, Field(description="g*, of the prior's Bregman divergence")] = (
        "squared-norm"
    )
    lam: Annotated[float, Search(1, 100), Field(gt=0, description="lambda, strength of the prior")] = 15.0
    eta: Annotated[
        float, Search(5e-3, 5e-1), Field(gt=0, description="step of the prior's mean along the memory (meg, mh)")
    ] = 0.05
    eta_alpha: Annotated[
        Literal["auto"] | Positive, Field(description="step of the prior's mean down the loss (lg, mh); auto: SGD's lr")
    ] = "auto"
    prox_steps: Annotated[int, Field(ge=1, description="K, steps on one minibatch to find theta")] = 5
    outer_lr: Annotated[
        Literal["auto"] | Positive, Field(description="alpha_m, step size of w; auto: w moves by one optimiser step")
    ] = "auto"
    beta: Annotated[float, Field(gt=0, description="relaxation of the server; above 1 it extrapolates")] = 1.0
    finetune: Annotated[int, Field(ge=0, description="steps on own training data before use")] = 0
    head_weight: Annotated[float, Field(gt=0, description="diagonal: weight of the head; the rest has 1")] = 0.1
    width: Annotated[float, Field(gt=0, description="log-cosh: where quadratic turns linear")] = 1.0

    law_contexts: ClassVar[tuple[dict[str, Any], ...]] = (
        {"generator": "diagonal", "prox_steps": 1},
        {"generator": "log-cosh", "prox_steps": 1, "variant": "paper", "jacobian": "exact"},
    )

    @property
    def personalize_epochs(self) -> int:
        return self.finetune  # an epoch has at least one minibatch

    def init_server(self, params: Params, population: Population) -> Params:
        return params

    def init_client(self, params: Params) -> Client:
        return Client(params, params, torch.zeros((), dtype=torch.int64))

    def dispatch(self, server: Params, ids: Tensor, rng: torch.Generator) -> Params:
        return tree.broadcast(server, len(ids))

    def local_update(
        self, task: Task, client: Client, down: Params, batches: Batches
    ) -> tuple[Client, TrainedAndBuffers, Info]:
        theta = tree.where(client.rounds > 0, client.theta, down)
        memory = tree.where(client.rounds > 0, client.memory, down)
        zero = torch.zeros(())
        used = batches.paired() if self._steps_on_pairs else batches
        w, theta, total, seen = scan(partial(self._iteration, task), (down, theta, zero, zero), memory, used)
        weight = batches.count if self.variant == "authors" else torch.ones_like(batches.count)
        up = TrainedAndBuffers(*task.split(task.sent(w)), weight)
        return Client(theta, w, client.rounds + 1), up, {"loss": total / seen.clamp_min(MIN_TOTAL_WEIGHT)}

    def aggregate(self, server: Params, ids: Tensor, ups: TrainedAndBuffers) -> Params:
        weights = ups.count if self.variant == "authors" else torch.ones_like(ups.count)
        return ups.relaxed_mean(server, weights, self.beta)

    def personalize(self, task: Task, client: Client, down: Params, batches: Batches) -> Params:
        theta = tree.where(client.rounds > 0, client.theta, down)
        if self.finetune:
            theta, _ = train(task, self.optimizer, theta, batches.first_steps(self.finetune))
        return theta

    def global_model(self, server: Params) -> Params:
        return server

    @property
    def pull_option(self) -> str:
        return "lam"

    @property
    def _steps_on_pairs(self) -> bool:
        """Whether the loss gradient is Per-FedAvg's, on pairs of minibatches."""
        return self.strategy == "mh" and self.variant == "authors"

    def _iteration(self, task: Task, carry: Any, memory: Params, batch: Batch) -> Any:
        """Do one minibatch, or one pair of them: a step of a scan."""
        w, last_theta, total, seen = carry
        own, rest = task.split(w)
        phi = make_generator(self.generator, task.head_names, self.head_weight, self.width)
        if self._steps_on_pairs:
            first, batch = batch.halves()
            ahead = self._descend_loss(task, own, own, rest, first)
            own = self._descend_loss(task, own, ahead, rest, batch)

        prior_mean = partial(self._prior_mean, task, rest=rest, memory=memory, last_theta=last_theta, batch=batch)
        if self.jacobian == "exact":
            mu, times_jacobian = vjp(prior_mean, own)[:2]
        else:
            mu = prior_mean(own)

        if self.variant == "paper":
            begin = last_theta
        else:
            begin = {**rest, **(mu if self.strategy == "lg" else own)}
        penalty_gradient = partial(phi.divergence_gradient, self.lam)
        theta, loss = proximal_steps(task, self.optimizer, begin, batch, penalty_gradient, mu, self.prox_steps)

        slope = phi.metric(mu, {name: self.lam * (value - theta[name]) for name, value in mu.items()})
        if self.jacobian == "exact":
            (slope,) = times_jacobian(slope)
        moved = tree.map(lambda a, b: a - self._outer_step * b, own, slope)
        count = batch.mask.sum()
        return {**theta, **moved}, theta, total + loss * count, seen + count

    def _prior_mean(
        self, task: Task, own: Params, rest: Params, memory: Params, last_theta: Params, batch: Batch
    ) -> Params:
        """Return mu_i for the trained parameters `own` of w_i."""
        mu = own
        if self.strategy in ("lg", "mh") and not self._steps_on_pairs:
            mu = self._descend_loss(task, own, own, rest, batch)
        eta = self.eta if self.strategy in ("meg", "mh") else 0.0
        return {name: value - eta * (memory[name] - last_theta[name]) for name, value in mu.items()}

    def _descend_loss(self, task: Task, own: Params, at: Params, rest: Params, batch: Batch) -> Params:
        """Return own - eta_alpha grad f(at)."""
        grads, _, _ = gradient(task, {**rest, **at}, batch)
        return tree.map(lambda a, b: a - self._loss_step * b, own, grads)

    @property
    def _outer_step(self) -> float | Tensor:
        """alpha_m."""
        if self.outer_lr == "auto":
            return envelope_step(self.optimizer, self.lam, self.prox_steps)
        return self.outer_lr

    @property
    def _loss_step(self) -> float:
        """eta_alpha."""
        if self.eta_alpha == "auto":
            return PAPER_ETA_ALPHA if self.optimizer.steady_step() is None else self.optimizer.lr
        return self.eta_alpha
