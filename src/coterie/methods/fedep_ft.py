"""FedEP with fine-tuning (Guo et al., "Federated Learning as Variational Inference: A Scalable Expectation Propagation
Approach", ICLR 2023).

The posterior of all data is approximated by a product of Gaussians with diagonal precisions, one site q_i for each
client and a prior q_0. A client refines its site in the company of all others, which are its cavity. With Lambda the
precision and w the mean of q = q_0 prod_i q_i, and lambda_i and eta_i the precision and the precision times the mean of
q_i, a client of the round does

    q / q_i:    Lambda_-i = Lambda - lambda_i,   Lambda_-i mu_-i = Lambda w - eta_i             (`_cavity`)
    theta_i  <- SGD on  f_i(theta) + ||theta - mu_-i||^2_(Lambda_-i) / (2 n_i),  from w         (`local_update`)
    lambda_i' = n_i max(0, diag Hessian of f_i at theta_i)                                      (`_curvature`)
    q_i'      = N(theta_i, 1 / (lambda_i' + Lambda_-i)) / (q / q_i)                             (`local_update`)
    q_i      <- q_i^(1 - damping) q_i'^damping,   q <- q times the change of q_i, for all i     (`aggregate`)
    v_i      <- SGD on f_i, over `finetune_epochs` epochs, from w                               (`personalize`; "FT")

f_i is a mean over n_i examples, so that n_i f_i is a negative log-likelihood. The third line is Laplace's approximation
of the tilted distribution, which is exact for quadratic f_i: with diagonal Hessians, w becomes the mean of the exact
product (tested). All changes together are w <- w + sum_i damping (lambda_i' + Lambda_-i) (theta_i - w) / Lambda. With
damping = `auto` = 1 over the clients heard in a round, the new w is the mean of their theta_i, weighted by their tilted
precisions. Larger values get there sooner if clients solve their problems in a round, and overshoot if they do not.

The Hessian's diagonal is the mean of v * (H v) over the minibatches of an epoch, with a v of random signs for each, a
hash of the minibatch's key. This is exact if the Hessian is diagonal, and else right on average.

Deviations: the paper compares four approximations of the tilted distribution: one variance for all parameters,
samples, Laplace's, and natural-gradient variational inference. This is Laplace's. The authors' code
(HanGuo97/expectation-propagation) takes the diagonal Fisher information for the Hessian, clips its outliers,
multiplies it by a constant to be tuned (500 in their examples), begins at a model that FedAvg trained, and gives the
changes to a server optimiser; here there is the Hessian itself, no constant, the initial model, and `damping`. Where
a step of SGD would go beyond mu_-i, the pull is so strong that it just reaches it (`_strength`). q_0 is centred at
the initial model. Buffers are averaged. A client's site stays with it, and only its change is sent: if the server
does not hear it (`clients_heard`), q lacks what the site has. The fine-tuned model is never sent or kept. A newcomer
adds a site to its own copy of q.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad

from coterie.core import tree
from coterie.core.batches import MIN_TOTAL_WEIGHT, Batch, Batches
from coterie.core.dropout import uniform
from coterie.core.method import Info, Method, Newcomer, Population
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.rng import KEY_STEP
from coterie.core.scan import scan
from coterie.core.search import Search
from coterie.core.task import Task
from coterie.core.training import train
from coterie.core.tree import Params


class Server(NamedTuple):
    w: Params
    precision: Params  # Lambda, of trained parameters
    damping: Tensor  # []


class Client(NamedTuple):
    """A site; what it holds for buffers and frozen parameters is unused."""

    precision: Params  # lambda_i
    natural: Params  # eta_i


class Up(NamedTuple):
    shift: Params  # damping (lambda_i' + Lambda_-i) (theta_i - w)
    precision: Params  # damping (lambda_i' - lambda_i)
    buffers: Params
    count: Tensor  # type: ignore[assignment]  # []; n_i


@dataclass(frozen=True)
class FedEPFT(Method[Server, Client, Server, Up]):
    exempt: ClassVar[dict[int, str]] = {
        9: "a client tells precisions and what moves their mean, so the law finds no whole model"
    }

    optimizer: Optimizer = SGD()
    damping: Annotated[
        Literal["auto"] | Annotated[float, Field(gt=0, le=1)],
        Field(description="how much of a site's change is made; auto: 1 over the clients heard in a round"),
    ] = "auto"
    prior: Annotated[
        float, Search(1e-3, 1e1), Field(gt=0, description="precision of the prior around the initial model")
    ] = 0.1
    finetune_epochs: Annotated[int, Search(1, 10), Field(ge=0, description="epochs on own data before use")] = 1

    @property
    def personalize_epochs(self) -> int:
        return self.finetune_epochs

    def init_server(self, params: Params, population: Population) -> Server:
        trained = params if population.task is None else population.task.split(params)[0]
        precision = tree.map(lambda leaf: torch.full_like(leaf, self.prior), trained)
        damping = 1 / population.audience if self.damping == "auto" else self.damping
        return Server(params, precision, torch.tensor(damping))

    def init_client(self, params: Params) -> Client:
        nothing = {name: torch.zeros_like(leaf) for name, leaf in params.items() if leaf.is_floating_point()}
        return Client(nothing, nothing)

    def dispatch(self, server: Server, ids: Tensor, rng: torch.Generator) -> Server:
        return tree.broadcast(server, len(ids))

    def local_update(self, task: Task, client: Client, down: Server, batches: Batches) -> tuple[Client, Up, Info]:
        w = task.split(down.w)[0]
        site = Client(*({name: part[name] for name in w} for part in client))
        cavity, centre = self._cavity(site, w, down.precision)
        strength = self._strength(cavity, batches.count, batches.top_pace())
        theta, loss = train(task, self.optimizer, down.w, batches, _pull, (centre, strength))
        trained, buffers = task.split(task.sent(theta))
        new = tree.scale(_curvature(task, theta, batches.epoch(0)), batches.count)
        shift = {name: down.damping * (new[name] + cavity[name]) * (trained[name] - w[name]) for name in w}
        change = {name: down.damping * (new[name] - site.precision[name]) for name in w}
        natural = {name: site.natural[name] + shift[name] + change[name] * w[name] for name in w}
        precision = tree.add(site.precision, change)
        after = Client({**client.precision, **precision}, {**client.natural, **natural})
        return after, Up(shift, change, buffers, batches.count), {"loss": loss}

    def aggregate(self, server: Server, ids: Tensor, ups: Up) -> Server:
        shift, change = tree.map(lambda leaf: leaf.sum(0), (ups.shift, ups.precision))
        precision = {name: (server.precision[name] + value).clamp_min(self.prior) for name, value in change.items()}
        moved = {name: server.w[name] + value / precision[name] for name, value in shift.items()}
        return Server({**server.w, **moved, **tree.mean(ups.buffers, ups.count)}, precision, server.damping)

    def personalize(self, task: Task, client: Client, down: Server, batches: Batches) -> Params:
        return train(task, self.optimizer, down.w, batches)[0]

    def global_model(self, server: Server) -> Params:
        return server.w

    def onboard(self, task: Task, newcomer: Newcomer, ids: Tensor, ups: Up | None) -> Newcomer:
        if ups is None:
            return newcomer
        return newcomer._replace(server=self.aggregate(newcomer.server, ids, ups))

    def _cavity(self, site: Client, w: Params, precision: Params) -> tuple[Params, Params]:
        """Return (Lambda_-i, mu_-i). Without rounding, Lambda_-i is nowhere less than the prior's precision."""
        cavity = {name: (precision[name] - site.precision[name]).clamp_min(self.prior) for name in w}
        centre = {name: (precision[name] * w[name] - site.natural[name]) / cavity[name] for name in w}
        return cavity, centre

    def _strength(self, cavity: Params, count: Tensor, pace: Tensor | float = 1.0) -> Params:
        """Return the pull to mu_-i: Lambda_-i / n_i, but no more than the largest step can follow."""
        step = self.optimizer.at_full_pace.steady_step()
        wanted = tree.map(lambda leaf: leaf / count, cavity)
        return wanted if step is None else tree.map(lambda leaf: leaf.clamp_max(1 / (step * pace)), wanted)


def _pull(theta: Params, anchor: Any) -> Tensor:
    """Return ||theta - centre||^2 / 2, each parameter counting its strength."""
    centre, strength = anchor
    return 0.5 * torch.stack([(strength[name] * (theta[name] - centre[name]) ** 2).sum() for name in theta]).sum()


def _curvature(task: Task, theta: Params, epoch: Batches) -> Params:
    """Return the diagonal of the Hessian of the mean training loss over the epoch, or 0 where it is negative."""

    def step(carry: Any, aux: Any, batch: Batch) -> Any:
        total, seen = carry
        trained, rest = task.split(aux)
        signs = _signs(batch.key, trained)

        def slope(at: Params) -> Tensor:
            return tree.dot(grad(lambda own: task.loss({**rest, **own}, batch)[0])(at), signs)

        count = batch.mask.sum()
        new = tree.map(lambda t, v, hv: t + count * v * hv, total, signs, grad(slope)(trained))
        return new, seen + count

    start = tree.map(torch.zeros_like, task.split(theta)[0])
    total, seen = scan(step, (start, epoch.mask.new_zeros(())), theta, epoch)
    return tree.map(lambda leaf: (leaf / seen.clamp_min(MIN_TOTAL_WEIGHT)).clamp_min(0), total)


def _signs(key: Tensor, like: Params) -> Params:
    """Return 1 or -1 for each number of `like`, a hash of the key and of the number's place."""
    drawn = {}
    for place, (name, leaf) in enumerate(like.items()):
        half = uniform(key + (place + 1) * KEY_STEP, tuple(leaf.shape)) < 0.5
        drawn[name] = torch.where(half, 1.0, -1.0).to(leaf)
    return drawn
