"""An engine: how the clients of a round are grouped and run. Results do not depend on it, up to float rounding; on the
number of workers they do not depend at all."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from coterie import tree
from coterie.batches import Batches
from coterie.data.federation import Federation
from coterie.device import on
from coterie.engine.loop import loop
from coterie.engine.stacked import stacked
from coterie.engine.workers import can_fork, fan_out
from coterie.errors import ConfigError
from coterie.scan import compiling
from coterie.spans import span, timed
from coterie.tree import Tree

T = TypeVar("T")
SPANS = {"train": "train", "probe": "choose"}  # what a purpose's time counts as; all others evaluate
Rows = tuple[tuple[Tree, ...], Batches]


@dataclass(frozen=True)
class Engine:
    kind: Literal["loop", "stacked"] = "loop"
    compiled: bool = False  # compile the steps
    chunk: int = 32  # clients at once
    workers: int = 1  # processes
    _warm: set[str] = field(default_factory=set, repr=False, compare=False)  # purposes whose steps are compiled

    def __post_init__(self) -> None:
        if self.workers > 1 and not can_fork():
            raise ConfigError([f"workers = {self.workers}: worker processes need Linux; use workers = 1"])

    def map(
        self,
        fn: Callable[..., Any],
        federation: Federation,
        ids: Sequence[int],
        rows_of: Callable[[list[int]], Rows],
        purpose: str,
    ) -> list[tuple[list[int], Tree]]:
        """Apply `fn(*row, batches)` to every client; returns the chunks: (their ids, their results as rows)."""
        groups = chunks(federation, ids, 1 if self.kind == "loop" else self.chunk)
        jobs = [functools.partial(self._chunk, purpose, fn, group, rows_of) for group in groups]
        with one_thread(), on(federation.x.device):
            if self.workers > 1 and len(jobs) > 1:
                results = fan_out(jobs, self.workers, warm=not self.compiled or purpose in self._warm)
                self._warm.add(purpose)
            else:
                results = [job() for job in jobs]
        return list(zip(groups, results, strict=True))

    def _chunk(
        self, purpose: str, fn: Callable[..., Any], group: list[int], rows_of: Callable[[list[int]], Rows]
    ) -> Tree:
        rows_of = timed("gather")(rows_of)
        with span(SPANS.get(purpose, "evaluate")), compiling(self.compiled):
            if self.kind == "loop":
                rows, batches = rows_of(group)
                return loop(fn, rows, batches)
            # A compiled step has one shape: a smaller chunk is filled up with copies that take no step.
            missing = self.chunk - len(group) if self.compiled else 0
            rows, batches = rows_of([*group, *[group[-1]] * missing])
            if missing:
                batches = batches._replace(mask=torch.cat([batches.mask[:-missing], 0 * batches.mask[-missing:]]))
            result = stacked(fn, rows, batches)
            return tree.map(lambda leaf: leaf[: len(group)], result) if missing else result

    def fitted(self, participants: int) -> Engine:
        """The same engine with chunks of even size, for this number of clients a round."""
        number = -(-participants // self.chunk)
        return replace(self, chunk=-(-participants // number))

    def describe(self) -> str:
        how = "one client at a time" if self.kind == "loop" else f"{self.chunk} clients stacked"
        processes = f"{self.workers} processes" if self.workers > 1 else "one process"
        return f"{self.kind}: {how}, {'compiled' if self.compiled else 'not compiled'}, {processes}"


def chunks(federation: Federation, ids: Sequence[int], size: int) -> list[list[int]]:
    """Clients of similar size together, so that little is padded; the same whatever order `ids` come in."""
    by_size = sorted(ids, key=lambda i: (-len(federation.split(i).train), federation.names[i]))
    return [by_size[start : start + size] for start in range(0, len(by_size), size)]


@timed("gather")
def in_order(results: list[tuple[list[int], T]], ids: Sequence[int]) -> T:
    """Rows of all chunks as one tree, in the order of `ids`. What they have twice (a model that a client keeps and also
    sends) is put in order once."""
    place = {client: row for row, client in enumerate(ids)}
    rows_of = [torch.tensor([place[client] for client in group]) for group, _ in results]
    known: dict[Any, Tensor] = {}

    def gather(*chunks: Tensor) -> Tensor:  # one copy: for large models this is a fair part of a round
        key = tuple((each.data_ptr(), each.dtype, each.shape, each.stride()) for each in chunks)
        if key in known and not chunks[0].is_meta:
            return known[key]
        merged = chunks[0].new_empty((len(ids), *chunks[0].shape[1:]))
        for rows, chunk in zip(rows_of, chunks, strict=True):
            merged.index_copy_(0, rows.to(chunk.device), chunk)
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


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
