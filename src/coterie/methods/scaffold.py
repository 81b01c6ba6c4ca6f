"""SCAFFOLD (Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020).

    y_i <- y_i - lr (g_i(y_i) - c_i + c), from y_i = x               (`local_update`; Algorithm 1)
    c_i <- (i)  g_i(x), or (ii)  c_i - c + (x - y_i) / (K lr)        (`local_update`; Algorithm 1)
    x   <- x + eta_g (1 / |S|) sum_{i in S} (y_i - x)                (`aggregate`; Algorithm 1)
    c   <- c + (1 / N) sum_{i in S} (c_i - its value before)         (`aggregate`; Algorithm 1)

S are the clients of the round, N is the number of all clients, and K is the client's number of steps. All control
variates begin at 0, so that c is the mean of c_i over *all* clients after every round, whoever took part (tested). The
average over S is uniform, as in the paper, and not by n_i. Buffers have no control variate and are averaged, never
extrapolated. Every client deploys x.

`control` chooses between (i) and (ii). `path` is (ii), the default and the paper's own choice in its experiments. It is
computed as the mean of g_i over the K steps, which is the same for plain SGD (tested) and has a meaning for any other
optimiser; with momentum or Adam, the correction c - c_i is added to the gradient. `gradient` is (i), which takes one
more pass over the data (over the minibatches of the round's first epoch).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree
from coterie.core.batches import MIN_TOTAL_WEIGHT, Batch, Batches
from coterie.core.method import Info, Method, Population
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.privacy import lot_of
from coterie.core.scan import scan
from coterie.core.search import UNSEARCHED
from coterie.core.task import Task
from coterie.core.training import gradient, private_gradient
from coterie.core.tree import Params


class Server(NamedTuple):
    x: Params
    c: Params  # for trained parameters
    size: Tensor  # []; N


class Down(NamedTuple):
    x: Params
    c: Params  # for trained parameters


class Up(NamedTuple):
    y: Params
    change: Params  # the change of c_i, for trained parameters


@dataclass(frozen=True)
class Scaffold(Method[Server, Params, Down, Up]):
    peer_to_peer: ClassVar[bool] = False  # c is the mean over all clients, which no peer with few neighbours knows

    optimizer: Optimizer = SGD()
    server_lr: Annotated[float, Field(gt=0, description="eta_g, step size of the server")] = 1.0
    control: Annotated[
        Literal["path", "gradient"],
        UNSEARCHED,
        Field(description="c_i from the gradients of the round, or at the received model"),
    ] = "path"

    @property
    def averaged(self) -> tuple[str, ...]:
        return ("y", "change")

    @property
    def stepped(self) -> tuple[str, ...]:
        return ("x",)

    def init_server(self, params: Params, population: Population) -> Server:
        trained = params if population.task is None else population.task.split(params)[0]
        return Server(params, tree.map(torch.zeros_like, trained), torch.tensor(float(population.size)))

    def init_client(self, params: Params) -> Params:
        return tree.map(torch.zeros_like, params)  # c_i

    def dispatch(self, server: Server, ids: Tensor, rng: torch.Generator) -> Down:
        return tree.broadcast(Down(server.x, server.c), len(ids))

    def local_update(self, task: Task, client: Params, down: Down, batches: Batches) -> tuple[Params, Up, Info]:
        trained = task.split(down.x)[0]
        zeros, zero = tree.map(torch.zeros_like, trained), batches.mask.new_zeros(())
        correction = {name: down.c[name] - client[name] for name in trained}
        start = (down.x, self.optimizer.init(trained), zeros, zero, zero, zero)
        lot = lot_of(self.optimizer, batches)
        y, _, total, steps, loss, seen = scan(partial(self._step, task), start, (correction, lot), batches)
        if self.control == "gradient":
            total, steps = scan(partial(_add_gradient, task), (zeros, zero), down.x, batches.epoch(0))
        control = tree.scale(total, 1 / steps.clamp_min(MIN_TOTAL_WEIGHT))
        change = {name: control[name] - client[name] for name in trained}
        return {**client, **control}, Up(task.sent(y), change), {"loss": loss / seen.clamp_min(MIN_TOTAL_WEIGHT)}

    def aggregate(self, server: Server, ids: Tensor, ups: Up) -> Server:
        y, change = tree.mean(ups, torch.ones(len(ids)))
        x, c = {**server.x, **y}, dict(server.c)  # buffers of x are averaged
        for name in change:
            x[name] = server.x[name] + self.server_lr * (y[name] - server.x[name])
            c[name] = server.c[name] + len(ids) / server.size * change[name]
        return Server(x, c, server.size)

    def personalize(self, task: Task, client: Params, down: Down, batches: Batches) -> Params:
        return down.x

    def _step(self, task: Task, carry: Any, aux: tuple[Params, Any], batch: Batch) -> Any:
        """Take one corrected step of y_i, and add up the gradients: a step of a scan."""
        y, state, total, steps, loss, seen = carry
        (correction, lot), guard = aux, self.optimizer.guard
        if guard is None:
            grads, now, rest = gradient(task, y, batch)
        else:
            (grads, now), rest = private_gradient(guard, task, y, batch, lot), task.split(y)[1]
        trained, state = self.optimizer.unguarded.update(tree.add(grads, correction), state, task.split(y)[0])
        count = batch.mask.sum()
        return {**trained, **rest}, state, tree.add(total, grads), steps + 1, loss + now * count, seen + count


def _add_gradient(task: Task, carry: Any, x: Params, batch: Batch) -> Any:
    """Add up the gradients at x over examples, and the number of examples: a step of a scan."""
    total, seen = carry
    count = batch.mask.sum()
    grads, _, _ = gradient(task, x, batch)
    return tree.map(lambda t, g: t + count * g, total, grads), seen + count
