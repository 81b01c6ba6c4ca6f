"""Hold the clients of several runs as those of one federation, so that they share chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batches import Batches, Withheld
from coterie.data.federation import Federation, replace_unchecked
from coterie.engine import Engine, Rows
from coterie.engine.engine import Results
from coterie.engine.fork_jobs import do_all
from coterie.experiment.pick_engine import Choices, RunStart, Work, pick_engine
from coterie.experiment.several.turns import Jobs, Request, RunEnd
from coterie.experiment.simulation import POOL_PURPOSE


class MergedFederation:
    """Hold the clients of all runs as one federation, and the engine that they share."""

    def __init__(self, federations: Sequence[Federation], choices: Choices | None = None) -> None:
        self.choices = choices
        named = [(f"{k}/{name}", each) for k, one in enumerate(federations) for name, each in one.clients.items()]
        self.federation = replace_unchecked(federations[0], clients=dict(named))
        self.first = np.cumsum([0, *(len(one.names) for one in federations)]).tolist()  # client of each run
        self.engine = Engine()

    def answer(self, asked: Sequence[Request | RunEnd], say: Callable[[str], None]) -> list[Any]:
        """Return the answer to each run's request, computed for all of them together."""
        answers: list[Any] = [None] * len(asked)
        starts = [each for each in asked if isinstance(each, RunStart)]
        if starts:  # then all of them: an engine is what a run asks for first
            self.engine = pick_engine(starts, lambda: self.union(_probes(starts)), say, self.choices)
            return [self.engine] * len(asked)
        do_all([job for each in asked if isinstance(each, Jobs) for job in each.jobs])
        works = {k: each for k, each in enumerate(asked) if isinstance(each, Work)}
        for purpose in dict.fromkeys(work.purpose for work in works.values()):
            alike = {k: work for k, work in works.items() if work.purpose == purpose}
            # On a pool of all test examples each run has enough work of its own, and the pools differ in size.
            for some in [{k: work} for k, work in alike.items()] if purpose == POOL_PURPOSE else [alike]:
                for k, results in self._map(some).items():
                    answers[k] = results
        return answers

    def _map(self, works: dict[int, Work]) -> dict[int, Results]:
        fn, federation, ids, rows_of, purpose = self.union(works)
        mapped = self.engine.map(fn, federation, ids, rows_of, purpose=purpose)
        results: dict[int, Results] = {k: [] for k in works}
        for group, rows in mapped:
            for k, own, at in self._owners(group):
                results[k].append(
                    (own, tree.rows(rows, torch.tensor(at)))
                )  # copied: the other runs make requests before it is used
        return results

    def union(self, works: dict[int, Work]) -> Work:
        """Return the work of several runs as one, on the merged federation."""
        ids = [self.first[k] + i for k, work in works.items() for i in work.ids]

        def rows_of(group: list[int]) -> Rows:
            parts, places = [], list[int]()
            for k, own, at in self._owners(group):
                parts.append(works[k].rows_of(own))
                places += at
            return _joined(parts, torch.tensor(places).argsort())

        first = next(iter(works.values()))
        return Work(first.fn, self.federation, ids, rows_of, first.purpose)

    def _owners(self, group: list[int]) -> list[tuple[int, list[int], list[int]]]:
        """Return, for each run with clients in `group`: (its number, its clients' own numbers, their places)."""
        run = (np.searchsorted(self.first, group, side="right") - 1).tolist()
        at = {k: [place for place, owner in enumerate(run) if owner == k] for k in sorted(set(run))}
        return [(k, [group[place] - self.first[k] for place in places], places) for k, places in at.items()]


def _probes(starts: Sequence[RunStart]) -> dict[int, Work]:
    return {k: start.probe() for k, start in enumerate(starts)}


def _joined(parts: list[Rows], order: Tensor) -> Rows:
    """Return the rows of several runs as one, in `order`; shorter ones are padded."""
    if len(parts) == 1:
        return parts[0]
    rows = tree.map(lambda *leaf: _end_to_end(leaf)[order], *(rows for rows, _ in parts))
    each = [batches for _, batches in parts]
    index, key = (_end_to_end([getattr(b, name) for b in each])[order] for name in ("index", "key"))
    mask = _end_to_end([b.mask for b in each], filled=0.0)[order]
    count = torch.cat([b.count for b in each])[order]
    withheld, everyone = (_joined_apart([getattr(b, name) for b in each], order) for name in ("withheld", "everyone"))
    paces = [b.pace for b in each if not isinstance(b.pace, tuple)]
    pace = _end_to_end(paces, filled=1.0)[order] if paces else ()
    return rows, Batches(each[0].x, each[0].y, index, mask, key, count, withheld, everyone, pace)


def _joined_apart(parts: Sequence[Withheld | tuple[()]], order: Tensor) -> Withheld | tuple[()]:
    """Return the minibatches that several runs have beside those of training as one; nothing if they have none."""
    found = [part for part in parts if isinstance(part, Withheld)]
    if not found:
        return ()
    mask = _end_to_end([part.mask for part in found], filled=0.0)[order]
    return Withheld(_end_to_end([part.index for part in found])[order], mask)


def _end_to_end(leaves: Sequence[Tensor], filled: float | None = None) -> Tensor:
    """Concatenate leaves along their first axis, padding those that are shorter along another axis.

    The padding is `filled` or, if that is None, a repetition of the last entry. It is never used: it stands for
    minibatches that are masked out, or for examples whose outputs are not read.
    """
    shape = [max(sizes) for sizes in zip(*(leaf.shape[1:] for leaf in leaves), strict=True)]
    wide = []
    for leaf in leaves:
        for axis, size in enumerate(shape, 1):
            if missing := size - leaf.shape[axis]:
                last = leaf.narrow(axis, leaf.shape[axis] - 1, 1)
                last = last if filled is None else torch.full_like(last, filled)
                leaf = torch.cat([leaf, last.expand(*last.shape[:axis], missing, *last.shape[axis + 1 :])], axis)
        wide.append(leaf)
    return torch.cat(wide)
