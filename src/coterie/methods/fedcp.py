"""FedCP (Zhang et al., "FedCP: Separating Feature Information for Personalized Federated Learning via Conditional
Policy", KDD 2023).

A shared body, the server's head W and the client's own head P_i. For every example, a small network beside the model,
the gate, splits the features z between the two heads: shares r go to the own head, and s = 1 - r to the server's, which
stays as it was received:

    c = v_i / ||v_i|| * z,   v_i = the sum of the rows of P_i's weights                                (`_context`)
    (r, s) = softmax of two numbers a feature, relu(norm(A c + a))                                     (`shares`)
    y(x)   = P_i(r * z) + W(s * z)                                                                     (`_combined`)
    body_i, P_i, gate_i <- SGD on  f_i + lam MMD^2(z, z_received),   W fixed                           (`_objective`)
    body <- mean of body_i,  gate <- mean of gate_i,  W <- mean of (P_i + W) / 2                       (`aggregate`)

z_received are the features of the body as received, fixed and in evaluation mode. MMD^2 compares the two samples of
features of a minibatch by a kernel k, over all pairs of its examples:

    MMD^2 = mean k(z, z') + mean k(z_received, z_received') - 2 mean k(z, z_received')            (`discrepancy`)

A client deploys the shared body with its own head, the server's, and the shared gate. If the gate gives everything to
the own head and lam is 0, it is FedPer, and if it gives everything to the server's, no head is trained (tested). The
head must be linear and the last layer. A newcomer trains a head, and a gate for itself, on the shared body.

The equations were compared with what the authors' program computes. Details and deviations:
- A bias counts as the weight of one more feature that is always 1, of which each head gets its mean share of the
  others. So two equal heads predict what one does, whatever the gate says. The paper adds both biases in full.
- The authors' program adds Gumbel noise to the two numbers of a feature before the softmax, with temperature 1, in
  predictions as well, so that its shares are random. Here there is none.
- P_i begins at the W that the client receives when it first takes part, and v_i is that of the present P_i, without a
  gradient. With a cross-entropy, steps of SGD leave v_i where it began, since the gradients of all rows add up to 0.
- k = (D / 7) sum of exp(-d^2 / (m D)) over m = 1/2, 1, 2, for features at distance d, where D is the mean of d^2 in the
  minibatch, without a gradient. So MMD^2 has the unit of squared features, whatever their size and number, and is at
  most ||e||^2 if all of them were shifted by e. Kernels of a fixed width and height, as in the public implementations,
  depend on the size of features. Class weights do not enter into it.
- The authors' lambda is 5, for a sum of kernels exp(-d^2 / (2 a)) with a = 10, 15, 20, 50. For features close together
  that is lam = 1.2 here, and for features far apart next to nothing. lam = 0.1 is a choice of ours: with 1, the body
  follows the data slowly.
- Means over clients are weighted by n_i; the mixture of both heads in halves is that of the public implementations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree
from coterie.core.batches import Batch, Batches
from coterie.core.method import Info, Method, Newcomer, Population, body_cautions
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.search import Search
from coterie.core.task import Task
from coterie.core.training import minimise
from coterie.core.tree import Params
from coterie.parts.auxiliary import Dense, affine, dense, head_inputs, normalised

WIDTHS = (0.5, 1.0, 2.0)  # of the kernels, times the mean squared distance
SLOPE = sum(1 / width for width in WIDTHS)  # of the sum of kernels at distance 0, in that unit
SMALLEST = 1e-5  # the least mean squared distance, relative to squared features: below it there is only rounding


class Model(NamedTuple):
    """The server's state, what every client is sent, and (its trained part) what a client trains."""

    theta: Params  # the body with a head
    gate: Dense  # from features to two numbers for each: that of the own head first


class Client(NamedTuple):
    theta: Params  # only its head P_i is used
    rounds: Tensor  # []; rounds taken part in


class Up(NamedTuple):
    theta: Params
    gate: Dense
    count: Tensor  # type: ignore[assignment]  # []; n_i


class View(NamedTuple):
    theta: Params  # the shared body with P_i
    head: Params  # W
    gate: Dense


@dataclass(frozen=True)
class FedCP(Method[Model, Client, Model, Up]):
    learns_from: ClassVar[str] = (
        "all clients, through the body, a head and the gate that they share; one head is its own"
    )

    optimizer: Optimizer = SGD()
    lam: Annotated[
        float, Search(1e-2, 1e1), Field(ge=0, description="lambda, pull of features to those of the received body")
    ] = 0.1

    @property
    def averaged(self) -> tuple[str, ...]:
        return "theta", "gate"

    @property
    def stepped(self) -> tuple[str, ...]:
        return "theta", "gate"

    def init_server(self, params: Params, population: Population) -> Model:
        dim = head_inputs(population.task, "FedCP")
        return Model(params, dense(population, "gate", dim, 2 * dim, params))

    def init_client(self, params: Params) -> Client:
        return Client(params, torch.zeros((), dtype=torch.int64))

    def dispatch(self, server: Model, ids: Tensor, rng: torch.Generator) -> Model:
        return tree.broadcast(server, len(ids))

    def local_update(self, task: Task, client: Client, down: Model, batches: Batches) -> tuple[Client, Up, Info]:
        start = _own_model(task, client, down)
        trained, rest = task.split(start)
        (trained, gate), rest, loss = minimise(
            self.optimizer,
            partial(self._objective, task),
            Model(trained, down.gate),
            rest,
            batches,
            anchor=down.theta,
        )
        theta = {name: {**rest, **trained}[name] for name in start}
        mixed = tree.mix(_head(task, theta), _head(task, down.theta), 0.5)
        up = Up(task.sent({**theta, **mixed}), gate, batches.count)
        return Client(theta, client.rounds + 1), up, {"loss": loss}

    def aggregate(self, server: Model, ids: Tensor, ups: Up) -> Model:
        theta, gate = tree.mean((ups.theta, ups.gate), ups.count)
        return Model({**server.theta, **theta}, gate)

    def personalize(self, task: Task, client: Client, down: Model, batches: Batches) -> View:
        return View(_own_model(task, client, down), _head(task, down.theta), down.gate)

    def predict(self, task: Task, view: View, x: Tensor) -> Tensor:
        return _combined(task, view.theta, view.head, view.gate, task.features(view.theta, x))

    def onboard(self, task: Task, newcomer: Newcomer, ids: Tensor, ups: Up | None) -> Newcomer:
        return newcomer._replace(only=task.head_names & task.trainable or None)

    def cautions(self, task: Task, population: Population) -> list[str]:
        return body_cautions(task)

    def _objective(
        self, task: Task, model: Model, rest: Params, batch: Batch, received: Params
    ) -> tuple[Tensor, tuple[Tensor, Params]]:
        theta = {**rest, **model.theta}
        _, features, rest = task.outputs_and_features(theta, batch)
        outputs = _combined(task, theta, _head(task, received), model.gate, features)
        loss = task.batch_loss(outputs, batch)
        pull = discrepancy(features, task.features(received, batch.x), batch.mask)
        return loss + self.lam * pull, (loss, rest)


def shares(gate: Dense, context: Tensor) -> tuple[Tensor, Tensor]:
    """Return (r, s), the shares of features for the own head and for the server's; all are [..., dim]."""
    scores = normalised(gate, affine(gate, context)).relu()
    r, s = torch.softmax(scores.reshape(*scores.shape[:-1], 2, -1), -2).unbind(-2)
    return r, s


def discrepancy(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """Return MMD^2 between the rows of `a` and those of `b`, a scalar; the gradient goes through both.

    Args:
        a: [examples, ...].
        b: the same shape.
        mask: [examples]; 0 for one that is left out.
    """
    here = (mask > 0).to(a.dtype)
    weight = here / here.sum().clamp_min(1.0)
    both, half = torch.cat([a, b]).flatten(1), torch.cat([weight, weight]) / 2
    square = (both**2).sum(1)
    distance = (square[:, None] + square - 2 * both @ both.T).clamp_min(0.0)
    mean = (half[:, None] * half * distance).sum().detach()
    unit = mean.clamp_min(SMALLEST * (half * square).sum().detach()).clamp_min(torch.finfo(a.dtype).tiny ** 0.5)
    kernel = sum((torch.exp(-distance / (width * unit)) for width in WIDTHS), torch.zeros_like(distance))
    sign = torch.cat([weight, -weight])
    return unit / (2 * SLOPE) * (sign[:, None] * sign * kernel).sum()


def _combined(task: Task, theta: Params, server_head: Params, gate: Dense, features: Tensor) -> Tensor:
    """Return P_i(r * z) + W(s * z), where P_i is the head of `theta`."""
    own_head = _head(task, theta)
    r, s = shares(gate, _context(own_head) * features)
    return _part(own_head, features, r) + _part(server_head, features, s)


def _part(head: Params, features: Tensor, share: Tensor) -> Tensor:
    """Return what a head makes of its share of the features, and of its bias."""
    weight, bias = _by_rank(head)
    outputs = (share * features) @ weight.T
    return outputs if bias is None else outputs + share.mean(-1, keepdim=True) * bias


def _context(head: Params) -> Tensor:
    """Return v_i / ||v_i||, [dim]."""
    total = _by_rank(head)[0].sum(0).detach()
    return total / (total**2).sum().sqrt().clamp_min(torch.finfo(total.dtype).tiny ** 0.5)


def _by_rank(head: Params) -> tuple[Tensor, Tensor | None]:
    """Return a linear head's weight [outputs, dim], and its bias [outputs] if it has one."""
    of_rank = {value.ndim: value for value in head.values()}
    return of_rank[2], of_rank.get(1)


def _head(task: Task, theta: Params) -> Params:
    return {name: value for name, value in theta.items() if name in task.head_names}


def _own_model(task: Task, client: Client, down: Model) -> Params:
    """Return the received body with P_i, or with the received head if the client has not taken part before."""
    own = tree.where(client.rounds > 0, _head(task, client.theta), _head(task, down.theta))
    return {**down.theta, **own}
