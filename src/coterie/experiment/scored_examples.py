"""Gather, once for all rounds, the examples that clients are scored on, with their labels and decoded inputs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from coterie.compute.cpu import cores
from coterie.compute.inference import faster_if_alone, faster_inference
from coterie.compute.torch_private import count_flops
from coterie.core.task import Task
from coterie.core.tree import Tree
from coterie.data.federation import Federation, Index, SplitName
from coterie.evaluation import Predictions, Scorer, Scores

T = TypeVar("T")
PARTS: tuple[SplitName, ...] = ("validation", "test")
EVALUATION_BYTES = 256 * 2**20  # of inputs that are kept decoded, as the model sees them
INLINE_FLOPS = 1e10  # up to this much work, evaluating here is faster than padding and dispatching to workers
SINGLE_THREAD_FLOPS = 5e8  # up to this much work, one thread is done before another has started
MAX_CALLED_CLIENTS = 200  # up to this many models are called one after another; more are stacked
ACTIVATION_BYTES = 12 * 2**20  # of one layer's outputs for the examples evaluated at once; more leave the cache
CALL_FLOPS = 5e6  # that could be done in the time that calling one client's model takes


class Examples:
    """Hold each client's validation examples and then its test examples, client after client."""

    def __init__(self, federation: Federation, task: Task) -> None:
        self.federation, self.task = federation, task
        self._parts = [split[part] for split in federation.clients.values() for part in PARTS]
        self._index = torch.from_numpy(np.concatenate(self._parts))
        sizes = torch.tensor([len(part) for part in self._parts])
        owner = torch.arange(len(sizes)).repeat_interleave(sizes)
        y = federation.y[self._index.to(federation.y.device)]
        self.scorer = Scorer(task, y, owner, len(sizes))
        self._work: dict[str, float] = {}  # floating-point operations

    def score(self, outputs: Tensor) -> dict[str, Scores]:
        """Return the clients' metrics by part, from the outputs for all examples."""
        scores = self.scorer(outputs)
        return {
            str(part): {metric: values[k :: len(PARTS)] for metric, values in scores.items()}
            for k, part in enumerate(PARTS)
        }

    def predictions(self, outputs: Tensor, part: SplitName) -> Predictions:
        """Return the outputs for one part, with labels and owners, from the outputs for all examples."""
        owner = self.scorer.owner
        own = owner % len(PARTS) == PARTS.index(part)
        return Predictions(outputs.cpu()[own], self.scorer.y[own], owner[own] // len(PARTS))

    def from_results(self, results: list[tuple[list[int], Tree]]) -> Tensor:
        """Lay out the results of `Engine.map` in our order, without the padding to a chunk's longest client."""
        rows = {i: (chunk, row) for group, chunk in results for row, i in enumerate(group)}
        parts = []
        for number, part in enumerate(self._parts):
            chunk, row = rows[number // len(PARTS)]
            parts.append(chunk[number % len(PARTS)][row][: len(part)])
        return torch.cat(parts)

    @functools.cached_property
    def x(self) -> list[Tensor]:
        """Return each client's inputs, decoded. They are kept with the federation, for its next run.

        Each is a tensor of its own: how products round depends on the layout in memory, and a client's metrics must
        not depend on the other clients.
        """
        inputs: list[Tensor]
        decode, inputs = self.federation.kept.get("scored inputs", (None, []))
        if not inputs or decode != self.task.decode:
            inputs = self._decoded()
            self.federation.kept["scored inputs"] = self.task.decode, inputs
        return inputs

    def _decoded(self) -> list[Tensor]:
        x, decode = self.federation.x, self.task.decode or (lambda raw: raw)
        sizes = [len(a) + len(b) for a, b in zip(self._parts[0::2], self._parts[1::2], strict=True)]
        # `split` of a tensor would import torch._dynamo, which takes a second.
        return [decode(x[own.to(x.device)]) for own in self._index.split_with_sizes(sizes)]

    def fits(self) -> bool:
        """Return whether there are few enough inputs to keep, and few enough clients to call one after another."""
        numbers = self.federation.x[0].numel() * 4 * len(self._index)  # as float32, whatever they are stored as
        return numbers <= EVALUATION_BYTES and len(self._parts) <= len(PARTS) * MAX_CALLED_CLIENTS

    def is_inline(self, what: str, predict: Callable[[Tensor], Tensor]) -> bool:
        """Return whether evaluating all models is so little work that running inline beats dispatching to workers.

        The work is counted, not timed, so that the answer is the same every time and on every machine.

        Args:
            what: names the models, so that the work is counted only once.
            predict: calls one of them.
        """
        if what not in self._work:
            one = self.x[0][:1]
            self._work[what] = count_flops(lambda: predict(one)) * len(self._index) + CALL_FLOPS * len(self.x)
        return self._work[what] <= INLINE_FLOPS

    def outputs(self, what: str, predict: Callable[[Task, int, Tensor], Tensor]) -> Tensor:
        """Return the outputs for all clients' inputs, end to end; threads share the work if there is enough of it.

        Args:
            what: names the models, as for `is_inline`, which must have been called before.
            predict: takes a task, a client's number and its inputs.
        """
        if self._work[what] <= SINGLE_THREAD_FLOPS or cores() == 1 or not self.x[0].is_cpu:
            with faster_inference():
                return torch.cat([predict(self.task, i, x) for i, x in enumerate(self.x)])
        largest_first = sorted(range(len(self.x)), key=lambda i: -len(self.x[i]))
        found = in_threads(self._tasks, largest_first, lambda task, i: predict(task, i, self.x[i]))
        return torch.cat([found[i] for i in range(len(self.x))])

    @functools.cached_property
    def _tasks(self) -> list[Task]:
        return task_per_thread(self.task)


class Pool:
    """Hold examples on which each of several models is scored, decoded once for all of them."""

    def __init__(self, federation: Federation, task: Task, index: Index) -> None:
        self.federation, self.task = federation, task
        self._index = torch.from_numpy(index)
        y = federation.y[self._index.to(federation.y.device)]
        self._scorer = Scorer(task, y, torch.zeros(len(index), dtype=torch.int64), 1)

    def fits(self, models: int) -> bool:
        """Return whether the inputs are few enough to keep, and the models few enough to call one after another."""
        numbers = self.federation.x[0].numel() * 4 * len(self._index)  # as float32, whatever they are stored as
        return numbers <= EVALUATION_BYTES and models <= MAX_CALLED_CLIENTS

    @functools.cached_property
    def _x(self) -> Tensor:
        x, decode = self.federation.x, self.task.decode or (lambda raw: raw)
        return decode(x[self._index.to(x.device)])

    def score(self, models: int, predict: Callable[[Task, int, Tensor], Tensor], width: int) -> Scores:
        """Return the metrics of each model on all examples, which it predicts `width` at a time.

        Args:
            models: how many there are.
            predict: takes a task, the number of a model, and inputs.
            width: so few examples that a layer's outputs for them stay in the cache.
        """
        pieces = [self._x[start : start + width] for start in range(0, len(self._x), width)]
        tasks = task_per_thread(self.task) if self._x.is_cpu else [self.task]
        found = in_threads(
            tasks,
            range(models),
            lambda task, i: self._scorer(torch.cat([predict(task, i, piece) for piece in pieces])),
        )
        return {metric: np.concatenate([found[i][metric] for i in range(models)]) for metric in found[0]}


def task_per_thread(task: Task) -> list[Task]:
    """Return a task for every core, since calling a module with given parameters changes the module meanwhile."""
    return [task, *(copy.deepcopy(task) for _ in range(cores() - 1))]


def in_threads(tasks: Sequence[Task], order: Sequence[int], call: Callable[[Task, int], T]) -> dict[int, T]:
    """Return `call(task, i)` for every i of `order`, begun in that order, in as many threads as there are tasks.

    Whichever thread makes a call, it is one call, so threads do not change a bit of what it returns.
    """
    free = list(tasks)

    def one(i: int) -> T:
        task = free.pop()
        try:
            with faster_inference():  # it is set for each thread
                return call(task, i)
        finally:
            free.append(task)

    # A thread must ask for the number of threads before it computes: else oneDNN starts some of its own in it.
    with ThreadPoolExecutor(len(free), initializer=torch.get_num_threads) as pool:
        return dict(zip(order, pool.map(one, order), strict=True))


def in_pieces(predict: Callable[[Tensor], Tensor], x: Tensor, positions: tuple[Tensor, ...]) -> Tree:
    """Predict the examples at `positions`, so few at a time that they stay in the cache."""
    width = examples_at_once(x)
    with faster_if_alone():
        return tuple(torch.cat([predict(x[piece]) for piece in torch.split(part, width)]) for part in positions)


def examples_at_once(x: Tensor) -> int:
    """Return how many examples to predict at once: their values as float32, in 32 channels, stay in the cache."""
    return max(1, ACTIVATION_BYTES // max(x[0].numel() * 4 * 32, 1))
