"""An engine groups the clients of a round and runs them.

Results depend on the engine up to float rounding only, and on its number of workers not at all.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from coterie.compute.compiled import backend
from coterie.compute.inference import one_client
from coterie.compute.packing import balance
from coterie.core import tree
from coterie.core.backend import using
from coterie.core.batches import Batches
from coterie.core.device import on
from coterie.core.errors import ConfigError
from coterie.core.tree import Tree
from coterie.data.federation import Federation
from coterie.engine.loop import loop
from coterie.engine.process_pool import ProcessPool, can_fork
from coterie.engine.stacked import stacked
from coterie.profiling import span, timed

T = TypeVar("T")
Rows = tuple[tuple[Tree, ...], Batches]  # what the clients of a chunk are given: states and messages, minibatches
Results = list[tuple[list[int], Tree]]  # chunks: the ids of their clients, their results as rows
ONE_THREAD_BYTES = 16 * 2**20  # what a server combines on one thread
SPANS = {"train": "train", "probe": "choose"}  # what a purpose's time counts as; all others evaluate


class ClientRunner(Protocol):
    """Applies a function to clients: an `Engine`, or what stands for one where several runs share it."""

    def map(
        self,
        fn: Callable[..., Any],
        federation: Federation,
        ids: Sequence[int],
        rows_of: Callable[[list[int]], Rows],
        purpose: str,
    ) -> Results:
        """Apply `fn` as `Engine.map` does."""


@dataclass(frozen=True)
class Engine:
    """One way to run clients.

    Args:
        kind: `loop` runs one client at a time, `stacked` all clients of a chunk at once.
        compiled: compile the steps.
        chunk: how many clients a stacked engine takes at once.
        workers: how many processes, or threads, share the chunks.
        lanes: how many clients of a chunk share a step (see `coterie.compute.packing`); None: all of them.
        threads: the workers are threads, which suits steps that C++ repeats.

    Raises:
        ConfigError: worker processes are asked for where there can be none.
    """

    kind: Literal["loop", "stacked"] = "loop"
    compiled: bool = False
    chunk: int = 32
    workers: int = 1
    lanes: int | None = None
    threads: bool = False
    _pool: list[ProcessPool] = field(default_factory=list, repr=False, compare=False)  # none until there is work for it

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
    ) -> Results:
        """Apply a function to every client.

        The work runs on one PyTorch thread. The number of threads that the caller had set is restored at the end, also
        when something is raised.

        Args:
            fn: what is done for one client, as `fn(*row, batches)`.
            federation: the data.
            ids: the clients.
            rows_of: gathers the rows and the minibatches of some clients; the examples of the minibatches are those of
                `federation`.
            purpose: what the time counts as in a profile. Worker processes know a function by it.

        Returns:
            The chunks, each as (the ids of its clients, their results as rows). They hold until the next call: a
            worker's results are shown where it wrote them.
        """
        whole = self.threads and len(ids) <= self.chunk  # then all of them as they came, so that no row has to move
        groups = [list(ids)] if whole else chunks(federation, ids, 1 if self.kind == "loop" else self.chunk)
        gather = [functools.partial(_gather, rows_of, group) for group in groups]
        work = functools.partial(self._work, purpose, fn)
        with one_thread(), on(federation.x.device):
            if self.workers > 1 and len(groups) > 1 and not self.threads:
                results = self._in_processes((purpose, fn), work, federation, gather)
            else:
                results = [work(rows()) for rows in gather]
        return list(zip(groups, results, strict=True))

    def _in_processes(
        self,
        key: tuple[str, Any],
        work: Callable[[Rows], Tree],
        federation: Federation,
        gather: Sequence[Callable[[], Rows]],
    ) -> list[Tree]:
        """Share the chunks out among processes, which have the examples already and are sent everything else."""
        if not self._pool:
            self._pool.append(ProcessPool(self.workers))
        x, y = federation.x, federation.y

        def sent(rows: Callable[[], Rows]) -> Tree:
            parts, batches = rows()
            return parts, batches[2:]

        def received(value: Tree) -> Tree:
            parts, rest = value
            return work((parts, Batches(x, y, *rest)))

        # The pool keeps `received`, and with it these tensors, so no others come to have their ids.
        whole_key = (*key, id(x), id(y))
        return self._pool[0].map(whole_key, received, [functools.partial(sent, rows) for rows in gather])

    def _work(self, purpose: str, fn: Callable[..., Any], rows: Rows) -> Tree:
        run, width = (loop, None) if self.kind == "loop" else (stacked, self.lanes or self.chunk)
        scans = backend(self.compiled, width, self.workers if self.threads else 1)
        alone = one_client() if self.kind == "loop" else contextlib.nullcontext()
        with span(SPANS.get(purpose, "evaluate")), using(scans), alone:
            return run(fn, *rows)

    def fitted(self, participants: int) -> Engine:
        """Return the same engine with chunks of even size, for this number of clients per round."""
        number = -(-participants // self.chunk)
        chunk = -(-participants // number)
        return replace(self, chunk=chunk, lanes=min(self.lanes or chunk, chunk), _pool=[])

    def describe(self) -> str:
        """Say in words how clients are run."""
        how = "one client at a time" if self.kind == "loop" else f"{self.lanes or self.chunk} clients stacked"
        how, kind = ("steps of one client", "threads") if self.threads else (how, "processes")
        processes = f"{self.workers} {kind}" if self.workers > 1 else "one process"
        return f"{self.kind}: {how}, {'compiled' if self.compiled else 'not compiled'}, {processes}"


def chunks(federation: Federation, ids: Sequence[int], size: int) -> list[list[int]]:
    """Share clients out into chunks of at most `size`, with about as much data in each, the largest client first.

    The order of `ids` does not matter.
    """
    by_size = sorted(ids, key=federation.rank.__getitem__)
    if size == 1:
        return [[client] for client in by_size]
    piles = balance([federation.sizes[i] for i in by_size], -(-len(by_size) // size), size)
    return [[by_size[place] for place in pile] for pile in piles]


@timed("gather")
def _gather(rows_of: Callable[[list[int]], Rows], group: list[int]) -> Rows:
    return rows_of(group)


@timed("gather")
def in_order(results: list[tuple[list[int], T]], ids: Sequence[int]) -> T:
    """Merge the rows of all chunks into one tree, in the order of `ids`.

    A tensor that the results hold twice (a model that a client keeps and also sends) is put in order once.
    """
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
    """Run PyTorch's operations in the block on one thread, and restore the number of threads at its end.

    Reductions are split by the number of threads and then round differently, so clients' work always runs on one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(values: Tree) -> contextlib.AbstractContextManager[None]:
    """Return a block for a server's work on `values`: on one thread if they are few.

    Threads that have just worked keep the workers' cores busy for a while, which costs more than they save on little.
    """
    return one_thread() if _nbytes(values) < ONE_THREAD_BYTES else contextlib.nullcontext()


def _nbytes(values: Tree) -> int:
    """Add up the bytes of all leaves; rows that are paged count as many."""
    if isinstance(values, Tensor):
        return values.nbytes
    if isinstance(values, dict | tuple):
        return sum(map(_nbytes, values.values() if isinstance(values, dict) else values))
    return ONE_THREAD_BYTES
