"""The examples that clients are scored on: found, labelled and made numbers of once, and not in every round."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from coterie.data.federation import Federation, SplitName
from coterie.evaluation import Predictions, Scorer, Scores
from coterie.task import Task
from coterie.tree import Tree

PARTS: tuple[SplitName, ...] = ("validation", "test")
EVALUATION_BYTES = 64 * 2**20  # of inputs that are kept as the model sees them
LITTLE = 1e9  # floating-point operations that are done sooner here than shared out among processes
CALL = 5e6  # as many as could be done while one client's model is called


class Examples:
    """Every client's validation examples and then its test examples, client after client."""

    def __init__(self, federation: Federation, task: Task) -> None:
        self.federation, self.task = federation, task
        self._parts = [split[part] for split in federation.clients.values() for part in PARTS]
        self._index = torch.from_numpy(np.concatenate(self._parts))
        sizes = torch.tensor([len(part) for part in self._parts])
        owner = torch.arange(len(sizes)).repeat_interleave(sizes)
        y = federation.y[self._index.to(federation.y.device)]
        self.scorer = Scorer(task, y, owner, len(sizes))
        self._little: dict[str, bool] = {}

    def score(self, outputs: Tensor) -> dict[str, Scores]:
        """By part; `outputs` are of all examples."""
        scores = self.scorer(outputs)
        return {
            str(part): {metric: values[k :: len(PARTS)] for metric, values in scores.items()}
            for k, part in enumerate(PARTS)
        }

    def predictions(self, outputs: Tensor, part: SplitName) -> Predictions:
        owner = self.scorer.owner
        own = owner % len(PARTS) == PARTS.index(part)
        return Predictions(outputs.cpu()[own], self.scorer.y[own], owner[own] // len(PARTS))

    def laid(self, results: list[tuple[list[int], Tree]]) -> Tensor:
        """The outputs of `Engine.map`, which are filled up to the longest client of a chunk, part by part."""
        rows = {i: (chunk, row) for group, chunk in results for row, i in enumerate(group)}
        parts = []
        for number, part in enumerate(self._parts):
            chunk, row = rows[number // len(PARTS)]
            parts.append(chunk[number % len(PARTS)][row][: len(part)])
        return torch.cat(parts)

    @functools.cached_property
    def x(self) -> list[Tensor]:
        """Each client's inputs, as the model sees them: tensors of their own, since products round by how they lie in
        memory, and a client's metrics are its own, whoever else is here."""
        x, decode = self.federation.x, self.task.decode or (lambda raw: raw)
        sizes = [len(a) + len(b) for a, b in zip(self._parts[0::2], self._parts[1::2], strict=True)]
        return [decode(x[own.to(x.device)]) for own in torch.split(self._index, sizes)]

    def fit(self) -> bool:
        """Whether the inputs are few enough to be kept, and the clients to be called one after another."""
        numbers = self.federation.x[0].numel() * 4 * len(self._index)  # as float32, whatever they are stored as
        return numbers <= EVALUATION_BYTES and len(self._parts) / len(PARTS) * CALL <= LITTLE

    def little(self, what: str, predict: Callable[[Tensor], Tensor]) -> bool:
        """Whether to evaluate `what` all models say is so little work that it is best done on the spot.

        It is counted, and not timed, so that it is the same every time and on every machine.
        """
        if what not in self._little:
            with FlopCounterMode(display=False) as counter:
                predict(self.x[0][:1])
            work = counter.get_total_flops() * len(self._index) + CALL * len(self.x)
            self._little[what] = work <= LITTLE
        return self._little[what]
