"""What methods share that average models by number of examples: the server's functions.

    w <- sum_i (n_i / n) w_i

A method takes them as they are, without inheriting from another one:

    class MyMethod(Method[Params, Params, Params, CountedParams]):
        init_server, dispatch, aggregate = averaging.init_server, averaging.dispatch, averaging.aggregate

`init_body` is for methods whose clients keep their heads, and `init_head` for those whose clients share nothing else.
`init_no_state` is for clients that keep nothing, and `finetune` for those that train what they receive before they use
it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.method import CountedParams, Population
from coterie.core.task import Task
from coterie.core.training import train
from coterie.core.tree import Params


def init_server(self: Any, params: Params, population: Population) -> Params:
    """Return w before the first round: the initial model."""
    return params


def init_body(self: Any, params: Params, population: Population) -> Params:
    """Return the initial model without its head."""
    head = population.task.head_names if population.task else frozenset()
    return {name: value for name, value in params.items() if name not in head}


def init_head(self: Any, params: Params, population: Population) -> Params:
    """Return the initial model's head."""
    head = population.task.head_names if population.task else frozenset()
    return {name: value for name, value in params.items() if name in head}


def init_no_state(self: Any, params: Params) -> tuple[()]:
    """Return the private state of a client that keeps nothing from round to round."""
    return ()


def dispatch(self: Any, server: Any, ids: Tensor, rng: torch.Generator) -> Any:
    """Send the server's state, w, to every client of the round."""
    return tree.broadcast(server, len(ids))


def aggregate(self: Any, server: Params, ids: Tensor, ups: CountedParams) -> Params:
    """Return sum_i (n_i / n) w_i over the clients of the round; what they do not send (`Task.sent`) stays as it is."""
    return {**server, **tree.mean(ups.params, ups.count)}


def finetune(self: Any, task: Task, client: tuple[()], down: Params, batches: Batches) -> Params:
    """Return the received w after the optimiser went through the client's own data."""
    return train(task, self.optimizer.unguarded, down, batches)[0]
