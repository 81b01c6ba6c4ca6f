"""QLSD with fine-tuning (Vono et al., "QLSD: Quantised Langevin Stochastic Dynamics for Bayesian Federated Learning",
AISTATS 2022).

The server's model w is a sample of the posterior exp(-n f(w)) of all clients' n examples, f = sum_i (n_i / n) f_i: it
moves along the clients' quantised gradients, and by noise. With gamma the step size and T = 1 the temperature:

    g_i <- C(grad f_i(w)),  E C(v) = v                                                 (`local_update`, `_quantised`)
    w   <- w - gamma sum_i (n_i / n) g_i + sqrt(2 gamma T / n) Z,   Z ~ N(0, I)        (`aggregate`; the QLSD step)
    v_i <- SGD on f_i, over `finetune_epochs` epochs, from w                           (`personalize`; "FT")

This is the paper's step with its gamma times n: there gradients are sums over examples. T = 0 without quantisation is
gradient descent (tested), and for a quadratic f the stationary distribution is known (tested). C rounds each number of
a tensor to one of `levels` = s multiples of 1/s of the tensor's largest number, up or down at random, so that the mean
is the number itself and the variance at most (largest / s)^2 / 4. A message then has one byte for each number (two from
s = 128 on). Z is a hash of the run's seed and the number of the round (`Population.seed`), so that copies of the server
agree and a resumed run draws the same; the rounding is a hash of the minibatch's key.

Deviations:
- The paper's variants with control variates or a memory of each client's gradients (QLSD* and QLSD++) are not here.
- `local_work` = `epochs` (default): a client takes an optimiser's step for each minibatch, and sends the quantised way
  that it went, which is about gamma grad f_i(w) with gamma = lr times its steps. That gamma, averaged over clients as
  the ways are, is also the noise's. `gradient` is the equations above with gamma = lr: one gradient of all of the
  client's examples in a round (the paper's is of a minibatch), whatever the number of epochs.
- The prior is flat, so that at T = 1 weights of a network that the data do not determine spread ever wider, as a random
  walk. Where that costs more than it gains, a lower `temperature` (a cold posterior) or the optimiser's `weight_decay`
  bounds it.
- Where only some clients are heard, n is their mean number of examples times the number of all clients.
- Largest numbers are those of each tensor, in place of its norm, or that of the whole gradient, which round most of
  them to 0.
- Buffers are averaged, unquantised and without noise. The fine-tuned model is never sent or kept. A newcomer
  fine-tunes the last w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.dropout import uniform
from coterie.core.method import Info, Method, Population
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.rng import KEY_STEP, ROUND_STEP, normals
from coterie.core.search import UNSEARCHED, Search
from coterie.core.task import Task
from coterie.core.training import mean_gradient, mean_loss, train
from coterie.core.tree import Params

MOST_LEVELS = 32767  # that two bytes hold
ONE_BYTE_LEVELS = 127
TINY = 1e-30  # less than the largest number of any tensor that is not 0


class Server(NamedTuple):
    w: Params
    seed: Tensor  # [] int64
    round: Tensor  # [] int64; rounds so far
    clients: Tensor  # [] int64; how many there are in all


class Up(NamedTuple):
    code: Params  # of trained parameters; whole multiples of `scale`
    scale: Params  # a scalar for each of them
    buffers: Params
    gamma: Tensor  # []
    count: Tensor  # type: ignore[assignment]  # []; n_i


@dataclass(frozen=True)
class QLSDFT(Method[Server, tuple[()], Params, Up]):
    exempt: ClassVar[dict[int, str]] = {9: "the server adds noise to what a client made, so it deploys something else"}
    not_meant_to_learn: ClassVar[dict[str, str]] = {
        "local_work = gradient": "it takes one step a round, so that it needs as many rounds as others take steps"
    }

    optimizer: Optimizer = SGD()
    local_work: Annotated[Literal["gradient", "epochs"], UNSEARCHED, Field(description="one gradient, or training")] = (
        "epochs"
    )
    temperature: Annotated[float, Search(1e-4, 1), Field(ge=0, description="T, of the posterior; 0 adds no noise")] = (
        1.0
    )
    levels: Annotated[
        int, UNSEARCHED, Field(ge=0, le=MOST_LEVELS, description="s, of the quantiser; 0 sends numbers as they are")
    ] = 127
    finetune_epochs: Annotated[int, Search(1, 10), Field(ge=0, description="epochs on own data before use")] = 1

    @property
    def personalize_epochs(self) -> int:
        return self.finetune_epochs

    def init_server(self, params: Params, population: Population) -> Server:
        seed, size = torch.tensor(population.seed), torch.tensor(population.size)
        return Server(params, seed, torch.zeros((), dtype=torch.int64), size)

    def init_client(self, params: Params) -> tuple[()]:
        return ()

    def dispatch(self, server: Server, ids: Tensor, rng: torch.Generator) -> Params:
        return tree.broadcast(server.w, len(ids))

    def local_update(self, task: Task, client: tuple[()], down: Params, batches: Batches) -> tuple[tuple[()], Up, Info]:
        optimizer = self.optimizer.at_full_pace
        lr = optimizer.steady_step() or optimizer.lr
        if self.local_work == "gradient":
            slope, left = mean_gradient(task, down, batches.epoch(0))
            gamma = lr * batches.epoch(0).first_steps(1).total_pace()
            way, buffers = tree.scale(slope, gamma), task.split(task.sent({**down, **left}))[1]
            loss = mean_loss(task, down, batches.epoch(0))
        else:
            theta, loss = train(task, self.optimizer, down, batches)
            trained, buffers = task.split(task.sent(theta))
            way, gamma = tree.sub(task.split(down)[0], trained), lr * batches.total_pace()
        code, scale = _quantised(way, self.levels, batches.key[0, 0])
        return (), Up(code, scale, buffers, gamma, batches.count), {"loss": loss}

    def aggregate(self, server: Server, ids: Tensor, ups: Up) -> Server:
        ways = {name: code * _over(ups.scale[name], code) for name, code in ups.code.items()}
        way, gamma = tree.mean((ways, ups.gamma), ups.count)
        examples = tree.widest_float(ups.count).mean() * server.clients
        spread = (2 * self.temperature * gamma / examples).sqrt()
        noise = normals(server.seed + server.round * ROUND_STEP, way)
        moved = {name: server.w[name] - value + spread.to(value) * noise[name] for name, value in way.items()}
        w = {**server.w, **moved, **tree.mean(ups.buffers, ups.count)}
        return server._replace(w=w, round=server.round + 1)

    def personalize(self, task: Task, client: tuple[()], down: Params, batches: Batches) -> Params:
        return train(task, self.optimizer, down, batches)[0]

    def global_model(self, server: Server) -> Params:
        return server.w

    def implausible(self, up: Up, examples: int) -> str | None:
        if float(up.gamma) < 0 or any(float(scale) < 0 for scale in up.scale.values()):
            return "step sizes or scales below 0"
        return super().implausible(up, examples)


def _quantised(values: Params, levels: int, key: Tensor) -> tuple[Params, Params]:
    """Return (codes, scales), whose products have the mean `values`; with no levels, the values themselves and ones."""
    if not levels:
        return values, tree.map(lambda leaf: leaf.new_ones(()), values)
    dtype = torch.int8 if levels <= ONE_BYTE_LEVELS else torch.int16
    codes, scales = {}, {}
    for place, (name, leaf) in enumerate(values.items()):
        scales[name] = leaf.abs().max() / levels
        exact = leaf / scales[name].clamp_min(TINY)
        draw = uniform(key + (place + 1) * KEY_STEP, tuple(leaf.shape))
        codes[name] = (exact + draw).floor().clamp(-levels, levels).to(dtype)
    return codes, scales


def _over(scale: Tensor, code: Tensor) -> Tensor:
    """Shape `scale` [clients] so that it multiplies `code` [clients, ...]."""
    return scale.reshape(-1, *[1] * (code.ndim - 1))
