"""An engine: how the clients of a round are grouped and run. Results do not depend on it, up to float rounding; on the
number of workers they do not depend at all."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from coterie import tree
from coterie.data.federation import Federation
from coterie.device import on
from coterie.engine.loop import loop
from coterie.engine.stacked import stacked
from coterie.engine.team import Rows, Team
from coterie.engine.workers import can_fork
from coterie.errors import ConfigError
from coterie.lanes import deal
from coterie.scan import compiling
from coterie.spans import span, timed
from coterie.tree import Tree

T = TypeVar("T")
LITTLE = 16 * 2**20  # bytes that a server combines on one thread
SPANS = {"train": "train", "probe": "choose"}  # what a purpose's time counts as; all others evaluate


@dataclass(frozen=True)
class Engine:
    kind: Literal["loop", "stacked"] = "loop"
    compiled: bool = False  # compile the steps
    chunk: int = 32  # clients at once
    workers: int = 1  # processes
    lanes: int | None = None  # of them in a step (see `coterie.lanes`); None: all
    threads: bool = False  # the workers are threads, for steps that C++ repeats
    _team: list[Team] = field(default_factory=list, repr=False, compare=False)  # none until there is work for it

    def __post_init__(self) -> None:
        if self.workers > 1 and not self.threads and not can_fork():
            raise ConfigError([f"workers = {self.workers}: worker processes need Linux; use workers = 1"])

    def map(
        self,
        fn: Callable[..., Any],
        federation: Federation,
        ids: Sequence[int],
        rows_of: Callable[[list[int]], Rows],
        purpose: str,
    ) -> list[tuple[list[int], Tree]]:
        """Apply `fn(*row, batches)` to every client; returns the chunks: (their ids, their results as rows).

        These hold until the next call: a worker's are shown where it wrote them.
        """
        whole = self.threads and len(ids) <= self.chunk  # then all of them as they came, so that no row has to move
        groups = [list(ids)] if whole else chunks(federation, ids, 1 if self.kind == "loop" else self.chunk)
        work = functools.partial(self._work, purpose, fn)
        with one_thread(), on(federation.x.device):
            if self.workers > 1 and len(groups) > 1 and not self.threads:
                results = self._workers().map(
                    (purpose, fn), work, [functools.partial(_gather, rows_of, each) for each in groups]
                )
            else:
                results = [work(_gather(rows_of, group)) for group in groups]
        return list(zip(groups, results, strict=True))

    def _work(self, purpose: str, fn: Callable[..., Any], rows: Rows) -> Tree:
        run, width = (loop, None) if self.kind == "loop" else (stacked, self.lanes or self.chunk)
        with span(SPANS.get(purpose, "evaluate")), compiling(self.compiled, width, self.workers if self.threads else 1):
            return run(fn, *rows)

    def _workers(self) -> Team:
        if not self._team:
            self._team.append(Team(self.workers))
        return self._team[0]

    def fitted(self, participants: int) -> Engine:
        """The same engine with chunks of even size, for this number of clients a round."""
        number = -(-participants // self.chunk)
        chunk = -(-participants // number)
        return replace(self, chunk=chunk, lanes=min(self.lanes or chunk, chunk), _team=[])

    def describe(self) -> str:
        how = "one client at a time" if self.kind == "loop" else f"{self.lanes or self.chunk} clients stacked"
        how, kind = ("steps of one client", "threads") if self.threads else (how, "processes")
        processes = f"{self.workers} {kind}" if self.workers > 1 else "one process"
        return f"{self.kind}: {how}, {'compiled' if self.compiled else 'not compiled'}, {processes}"


def chunks(federation: Federation, ids: Sequence[int], size: int) -> list[list[int]]:
    """At most `size` clients each, with as much data in one as in another, the largest client first.

    The same whatever order `ids` come in.
    """
    by_size = sorted(ids, key=federation.rank.__getitem__)
    if size == 1:
        return [[client] for client in by_size]
    piles = deal([federation.sizes[i] for i in by_size], -(-len(by_size) // size), size)
    return [[by_size[place] for place in pile] for pile in piles]


@timed("gather")
def _gather(rows_of: Callable[[list[int]], Rows], group: list[int]) -> Rows:
    return rows_of(group)


@timed("gather")
def in_order(results: list[tuple[list[int], T]], ids: Sequence[int]) -> T:
    """Rows of all chunks as one tree, in the order of `ids`. What they have twice (a model that a client keeps and also
    sends) is put in order once."""
    if len(results) == 1 and results[0][0] == list(ids):
        return tree.map(torch.Tensor.contiguous, results[0][1])
    place = {client: row for row, client in enumerate(ids)}
    rows_of = [torch.tensor([place[client] for client in group]) for group, _ in results]
    known: dict[Any, Tensor] = {}

    def gather(*chunks: Tensor) -> Tensor:  # one copy: for large models this is a fair part of a round
        key = tuple((each.data_ptr(), each.dtype, each.shape, each.stride()) for each in chunks)
        if key in known and not chunks[0].is_meta:
            return known[key]
        merged = chunks[0].new_empty((len(ids), *chunks[0].shape[1:]))
        for rows, chunk in zip(rows_of, chunks, strict=True):
            tree.write_rows(merged, rows, chunk)
        return known.setdefault(key, merged)

    return tree.map(gather, results[0][1], *(rows for _, rows in results[1:]))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Reductions split by the number of threads round differently: client work always runs on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(values: Tree) -> contextlib.AbstractContextManager[None]:
    """One thread for a server's work on little; threads that have just worked keep the workers' cores busy a while."""
    return one_thread() if _nbytes(values) < LITTLE else contextlib.nullcontext()


def _nbytes(values: Tree) -> int:
    """Of all leaves; rows that are paged are many."""
    if isinstance(values, Tensor):
        return values.nbytes
    if isinstance(values, dict | tuple):
        return sum(map(_nbytes, values.values() if isinstance(values, dict) else values))
    return LITTLE
