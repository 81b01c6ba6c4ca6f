"""pFedBayes (Zhang et al., "Personalized Federated Learning via Variational Bayesian Inference", ICML 2022).

Every weight is a Gaussian. Client i has a posterior q_i = N(mu_i, sigma_i^2) of its own, and the server's w = N(mu,
sigma^2) is its prior. sigma = log(1 + e^rho). In a round the client copies w to w_i, and each minibatch takes

    q_i <- a step on  E_q[f_i(theta)] + (zeta / n_i) KL(q_i || w_i)      (`_iteration`; the personal model)
    w_i <- a step on  KL(q_i || w_i), with step size `prior_lr`          (`_iteration`; the localised global model)
    w   <- (1 - beta) w + beta sum_i (n_i / n) w_i                       (`aggregate`)

The expectation is one draw theta = mu_i + sigma_i * noise a minibatch, through which the gradient goes. The noise is a
hash of the minibatch's key, so that it is the same in every engine. A client deploys mu_i or, with `draws` > 0, the
mean of that many models' probabilities, drawn once for all examples (P); mu is the global model (G).

Without noise and with variances that stay (`noise` = false, `learn_variance` = false), KL is ||mu_i - mu||^2 / (2
sigma^2), so that q_i takes proximal steps (tested).

Details: f_i is a mean over examples, so that KL is divided by n_i. The pull to the prior is zeta / (n_i sigma^2). (The
paper's zeta = 10 is for thousands of examples.) Where a step of SGD would go beyond the prior's mean, since variances
have become small, the pull is so strong that it just reaches it (`_weights`). zeta `auto` (default) is the one with
which the pull takes back a tenth of a client's way in a round (`coterie.parts.pulls`), whatever n_i, sigma and the
schedule are: n_i sigma^2 / 10 over the step size times the number of steps. sigma is a number or `auto` (default): for
each tensor a tenth of its initial root mean square, so that noise is small beside the weights of every layer. (0.1 is
larger than the weights of a layer of 64 inputs, which begin with 0.07.) Buffers follow q_i's forward passes and are
averaged. The mean of w_i goes prior_lr / sigma^2 of its way to that of q_i with each minibatch, with its present sigma:
a tenth, with `auto`, and never more than all of it. A client's q_i starts at the w that it receives when it first takes
part. Clients are averaged by n_i; the paper, uniformly. The optimiser trains rho like any parameter, so that its
`weight_decay` also draws rho to 0, and sigma to log 2 = 0.69. Leave it at 0: the prior already regularises.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

from coterie.core import tree
from coterie.core.batches import MIN_TOTAL_WEIGHT, Batch, Batches
from coterie.core.method import Info, Method, Population
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.rng import ROUND_STEP, normals
from coterie.core.scan import scan
from coterie.core.search import UNSEARCHED, Search
from coterie.core.task import Task
from coterie.core.tree import Params
from coterie.parts import pulls
from coterie.parts.mixtures import Mixture, predict_mixture


class Gaussian(NamedTuple):
    mu: Params  # a model, buffers included
    rho: Params  # sigma = log(1 + e^rho); that of a buffer is unused


class Up(NamedTuple):
    mu: Params
    rho: Params  # of trained parameters only
    count: Tensor  # type: ignore[assignment]  # []; n_i


class Client(NamedTuple):
    q: Gaussian
    rounds: Tensor  # []; rounds taken part in


@dataclass(frozen=True)
class PFedBayes(Method[Gaussian, Client, Gaussian, Up]):
    optimizer: Optimizer = SGD()
    zeta: Annotated[
        pulls.Strength,
        Search(1e-2, 1e1),
        Field(description="zeta, weight of the divergence from the prior; auto: a tenth of a round's way"),
    ] = "auto"
    sigma: Annotated[
        Literal["auto"] | Annotated[float, Field(gt=0)],
        Search(1e-2, 3e-1),
        Field(description="standard deviation of every weight at first; auto: a tenth of the initial weights' spread"),
    ] = "auto"
    prior_lr: Annotated[
        Literal["auto"] | Annotated[float, Field(ge=0)],
        Field(description="step size of the localised global model; auto: a tenth of its variances"),
    ] = "auto"
    beta: Annotated[
        float, UNSEARCHED, Field(gt=0, le=1, description="share of the clients' mean in the server's new w")
    ] = 1.0
    noise: Annotated[bool, Field(description="draw weights in training; otherwise use their means")] = True
    learn_variance: Annotated[bool, Field(description="learn the variances as well as the means")] = True
    draws: Annotated[int, Field(ge=0, description="models drawn for a prediction; 0 predicts with the means")] = 0

    @property
    def averaged(self) -> tuple[str, ...]:
        return ("mu", "rho")

    @property
    def stepped(self) -> tuple[str, ...]:
        return ("mu", "rho")

    def init_server(self, params: Params, population: Population) -> Gaussian:
        return self._around(params)

    def init_client(self, params: Params) -> Client:
        return Client(self._around(params), torch.zeros((), dtype=torch.int64))

    def dispatch(self, server: Gaussian, ids: Tensor, rng: torch.Generator) -> Gaussian:
        return tree.broadcast(server, len(ids))

    def local_update(self, task: Task, client: Client, down: Gaussian, batches: Batches) -> tuple[Client, Up, Info]:
        q = tree.where(client.rounds > 0, client.q, down)
        zero = batches.mask.new_zeros(())
        prior = _trained(task, down)
        pull = (
            pulls.pull_of_a_round(self.optimizer, pulls.HELD_BACK, prior.mu, batches) if self.zeta == "auto" else zero
        )
        start = (q, self.optimizer.init(self._free(_trained(task, q))), prior, zero, zero)
        q, _, prior, total, seen = scan(partial(self._iteration, task), start, (batches.count, pull), batches)
        up = Up(task.sent({**q.mu, **prior.mu}), prior.rho, batches.count)
        return Client(q, client.rounds + 1), up, {"loss": total / seen.clamp_min(MIN_TOTAL_WEIGHT)}

    def aggregate(self, server: Gaussian, ids: Tensor, ups: Up) -> Gaussian:
        mean = Gaussian(*tree.mean((ups.mu, ups.rho), ups.count))
        old = Gaussian(server.mu, {name: server.rho[name] for name in mean.rho})
        mu = {
            name: tree.mix(old.mu[name], value, self.beta) if name in mean.rho else value
            for name, value in mean.mu.items()
        }
        return Gaussian({**server.mu, **mu}, {**server.rho, **tree.mix(old.rho, mean.rho, self.beta)})

    def personalize(self, task: Task, client: Client, down: Gaussian, batches: Batches) -> Params | Mixture:
        q = tree.where(client.rounds > 0, client.q, down)
        if not self.draws:
            return q.mu
        keys = torch.arange(1, self.draws + 1) * ROUND_STEP

        def drawn(key: Tensor) -> Params:
            return {**q.mu, **_draw(_trained(task, q), key)}

        return Mixture(vmap(drawn)(keys), torch.full((self.draws,), 1 / self.draws))

    @property
    def pull_option(self) -> str:
        return "zeta"

    def predict(self, task: Task, view: Params | Mixture, x: Tensor) -> Tensor:
        return predict_mixture(task, view, x) if isinstance(view, Mixture) else task.logits(view, x)

    def global_model(self, server: Gaussian) -> Params:
        return server.mu

    def _around(self, params: Params) -> Gaussian:
        """Return a Gaussian with mean `params` and standard deviations `sigma`."""
        spread = _spread(params) if self.sigma == "auto" else dict.fromkeys(params, torch.tensor(self.sigma))
        rho = {name: value.expm1().log() for name, value in spread.items()}
        return Gaussian(
            params, {name: torch.zeros_like(leaf, dtype=torch.float32) + rho[name] for name, leaf in params.items()}
        )

    def _free(self, q: Gaussian) -> Params:
        """Return what the optimiser trains, under names of its own."""
        return tree.pack(q) if self.learn_variance else tree.pack(Gaussian(q.mu, {}))

    def _iteration(self, task: Task, carry: Any, given: tuple[Tensor, Tensor], batch: Batch) -> Any:
        """Do one minibatch: a step of a scan."""
        q, state, prior, total, seen = carry
        own = _trained(task, q)
        rest = task.split(q.mu)[1]

        def objective(free: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
            new = tree.rebuild({**tree.pack(own), **free}, own)
            theta = _draw(new, batch.key) if self.noise else new.mu
            loss, left = task.loss({**rest, **theta}, batch)
            return loss + divergence(new, prior, self._weights(prior, *given)), (loss, left)

        grads, (_, (loss, left)) = grad_and_value(objective, has_aux=True)(self._free(own))
        free, state = self.optimizer.update(grads, state, self._free(own))
        own = tree.rebuild({**tree.pack(own), **free}, own)
        slope = grad(lambda flat: divergence(own, tree.rebuild(flat, own)))(tree.pack(prior))
        moved = {
            path: value - self._prior_step(prior, path) * slope[path] * (self.learn_variance or path.startswith("mu/"))
            for path, value in tree.pack(prior).items()
        }
        q = Gaussian({**q.mu, **left, **own.mu}, {**q.rho, **own.rho})
        seen_now = batch.mask.sum()
        return q, state, tree.rebuild(moved, prior), total + loss * seen_now, seen + seen_now

    def _weights(self, prior: Gaussian, count: Tensor, pull: Tensor) -> Params:
        """Return what the divergence of each weight counts: zeta / n_i, but no more than a step can follow.

        With zeta auto it is `pull` s_w^2, so that `pull` is the pull on each mean.

        The pull on a mean is its weight over s_w^2, so that a step of size lr goes lr * weight / s_w^2 of the way to
        the prior's mean: beyond 1 it goes too far, beyond 2 it diverges.
        """
        if isinstance(self.zeta, str):
            return {name: pull * F.softplus(rho) ** 2 for name, rho in prior.rho.items()}
        step = self.optimizer.steady_step()
        wanted = self.zeta / count
        return {
            name: wanted if step is None else torch.minimum(wanted, F.softplus(rho) ** 2 / step)
            for name, rho in prior.rho.items()
        }

    def _prior_step(self, prior: Gaussian, path: str) -> Tensor:
        """Return the step size of one tensor of w_i: at most its variance, with which its mean reaches that of q_i."""
        variance = F.softplus(prior.rho[path.partition("/")[2]]) ** 2
        return variance / 10 if isinstance(self.prior_lr, str) else variance.clamp_max(self.prior_lr)


def divergence(q: Gaussian, w: Gaussian, weights: Params | None = None) -> Tensor:
    """Return KL(q || w), a scalar: sum log(s_w / s_q) + (s_q^2 + (mu_q - mu_w)^2) / (2 s_w^2) - 1/2.

    With `weights`, by name, each weight's term counts so much.
    """
    terms = []
    for name, mu in q.mu.items():
        s_q, s_w = F.softplus(q.rho[name]), F.softplus(w.rho[name])
        each = (s_w / s_q).log() + (s_q**2 + (mu - w.mu[name]) ** 2) / (2 * s_w**2) - 0.5
        terms.append((each if weights is None else weights[name] * each).sum())
    return torch.stack(terms).sum()


def _spread(params: Params) -> Params:
    """Return a tenth of the root mean square of each tensor, by name; of all of them where a tensor is 0."""
    squares = {name: value.float().square().mean() for name, value in params.items() if value.is_floating_point()}
    typical = torch.stack(list(squares.values())).mean()
    return {
        name: torch.where(squares.get(name, typical) > 0, squares.get(name, typical), typical).sqrt() / 10
        for name in params
    }


def _trained(task: Task, q: Gaussian) -> Gaussian:
    """Return the Gaussian of the trained parameters alone."""
    mu = task.split(q.mu)[0]
    return Gaussian(mu, {name: q.rho[name] for name in mu})


def _draw(q: Gaussian, key: Tensor) -> Params:
    """Return mu + sigma * noise; the noise is a hash of `key`, the tensor and the position."""
    noise = normals(key, q.mu)
    return {name: mu + F.softplus(q.rho[name]) * noise[name] for name, mu in q.mu.items()}
