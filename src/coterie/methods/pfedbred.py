"""pFedBreD (Shi et al., "PRIOR: Personalized Prior for Reactivating the Information Overlooked in FL", NeurIPS 2023).

The global model w becomes a prior of the client's own, with mean mu_i(w), before the client infers. On each minibatch:

    mu      = w_i - eta grad Phi_i(w_i)                                           (`_iteration`; eqs 11 and 14)
    theta_i <- Dprox f_i(mu) = argmin_theta  f_i(theta) + lambda D_g*(theta, mu)  (`_iteration`; eq. 2, by K steps)
    w_i     <- w_i - alpha_m lambda D mu(w_i) grad^2 g*(mu) (mu - theta_i)        (`_iteration`; eq. 13)
    w       <- (1 - beta) w + beta sum_i p_i w_i                                  (`aggregate`; Algorithm 1, line 12)

`strategy` is Phi_i: lg takes f_i, meg the memorised envelope gradient m_i - theta_i (m_i is the client's w_i at the end
of its last round), mh both, none nothing, which is pFedMe (tested). The optimiser takes the K steps: its lr is the
paper's alpha. P is theta_i after `finetune` more steps on f_i, and w where a client never took part; G is w.

`variant` = `paper` is the above. `authors` (default) is the published code, whose mh is what reaches the paper's tables
(the letter of eq. 14 does not beat pFedMe). There, mh's loss gradient is (i) Per-FedAvg's, w' = w - eta_alpha grad
f_B2(w - eta_alpha grad f_B1(w)), (ii) written into w_i before all else, (iii) of two minibatches (`Batches.pairs`);
(iv) lg's step was 0.05, which is `eta_alpha` here, 0.01 as in the paper; (v) the K steps begin at w' (mh), w_i (meg,
none) or mu (lg), not at the last theta_i; (vi) D mu is taken as the identity; (vii) p_i is n_i / n, not uniform; (viii)
m_i and theta_i begin as the model first received (here in both variants).

Deviations: that code trains all clients every round and averages some; here only those train, and the memory of the
others ages. The tables' "+AM" is taken to be `beta` = 2 and "+FT" `finetune`; neither is defined in public. Generators
other than the squared norm (`coterie.bregman`) are ours. Buffers follow theta_i and are averaged, never extrapolated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.func import vjp

from coterie import tree
from coterie.batches import LEAST, Batch, Batches
from coterie.bregman import Generator, make
from coterie.local import SGD, Optimizer, gradient, proximal, train
from coterie.method import Info, Method, Parts, Population
from coterie.scan import scan
from coterie.task import Task
from coterie.tree import Params


class Client(NamedTuple):
    theta: Params
    memory: Params  # m_i
    rounds: Tensor  # []; rounds taken part in


@dataclass(frozen=True)
class PFedBreD(Method[Params, Client, Params, Parts]):
    optimizer: Optimizer = SGD(0.01)
    strategy: Annotated[Literal["mh", "meg", "lg", "none"], Field(description="what makes the prior personal")] = "mh"
    variant: Annotated[Literal["authors", "paper"], Field(description="published code or the paper's text")] = "authors"
    generator: Annotated[Generator, Field(description="g*, of the prior's Bregman divergence")] = "squared-norm"
    lam: Annotated[float, Field(gt=0, description="lambda, strength of the prior")] = 15.0
    eta: Annotated[float, Field(gt=0, description="step of the prior's mean along the memory (meg, mh)")] = 0.05
    eta_alpha: Annotated[float, Field(gt=0, description="step of the prior's mean down the loss (lg, mh)")] = 0.01
    prox_steps: Annotated[int, Field(ge=1, description="K, steps on one minibatch to find theta")] = 5
    outer_lr: Annotated[float, Field(gt=0, description="alpha_m, step size of w")] = 0.01
    beta: Annotated[float, Field(gt=0, description="relaxation of the server; above 1 it extrapolates")] = 1.0
    finetune: Annotated[int, Field(ge=0, description="steps on own training data before use")] = 0
    head_weight: Annotated[float, Field(gt=0, description="diagonal: weight of the head; the rest has 1")] = 0.1
    width: Annotated[float, Field(gt=0, description="log-cosh: where quadratic turns linear")] = 1.0
    law_contexts: ClassVar[tuple[dict[str, Any], ...]] = (
        {"generator": "diagonal", "prox_steps": 1},
        {"generator": "log-cosh", "prox_steps": 1, "variant": "paper"},
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

    def local_update(self, task: Task, client: Client, down: Params, batches: Batches) -> tuple[Client, Parts, Info]:
        theta, memory = (tree.where(client.rounds > 0, kept, down) for kept in (client.theta, client.memory))
        start, used = (down, theta, torch.zeros(()), torch.zeros(())), batches.pairs() if self._meta else batches
        w, theta, total, seen = scan(partial(self._iteration, task), start, memory, used)
        info = {"loss": total / seen.clamp_min(LEAST)}
        return Client(theta, w, client.rounds + 1), Parts(*task.split(w), batches.count), info

    def aggregate(self, server: Params, ids: Tensor, ups: Parts) -> Params:
        weights = ups.count if self.variant == "authors" else torch.ones_like(ups.count)
        return ups.relax(server, weights, self.beta)

    def personalize(self, task: Task, client: Client, down: Params, batches: Batches) -> Params:
        theta = tree.where(client.rounds > 0, client.theta, down)
        return train(task, self.optimizer, theta, batches.first(self.finetune))[0] if self.finetune else theta

    def global_model(self, server: Params) -> Params:
        return server

    @property
    def _meta(self) -> bool:
        return self.strategy == "mh" and self.variant == "authors"

    def _iteration(self, task: Task, carry: Any, memory: Params, batch: Batch) -> Any:
        w, last, total, seen = carry
        own, rest = task.split(w)
        phi, paper = make(self.generator, task.head_names, self.head_weight, self.width), self.variant == "paper"

        def descend(own: Params, at: Params, batch: Batch) -> Params:  # own - eta_alpha grad f(at)
            return tree.map(lambda a, b: a - self.eta_alpha * b, own, gradient(task, {**rest, **at}, batch)[0])

        def mean(own: Params) -> Params:  # mu_i
            mu = descend(own, own, batch) if self.strategy in ("lg", "mh") and not self._meta else own
            towards = self.eta if self.strategy in ("meg", "mh") else 0.0
            return {name: value - towards * (memory[name] - last[name]) for name, value in mu.items()}

        if self._meta:
            first, batch = batch.halves()
            own = descend(own, descend(own, own, first), batch)
        mu, transpose = vjp(mean, own)[:2]
        begin = last if paper else {**rest, **(mu if self.strategy == "lg" else own)}
        theta, loss = proximal(task, self.optimizer, begin, batch, partial(phi.pull, self.lam), mu, self.prox_steps)
        slope = phi.metric(mu, {name: self.lam * (value - theta[name]) for name, value in mu.items()})
        moved = tree.map(lambda a, b: a - self.outer_lr * b, own, transpose(slope)[0] if paper else slope)
        count = batch.mask.sum()
        return {**theta, **moved}, theta, total + loss * count, seen + count
