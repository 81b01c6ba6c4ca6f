"""Worker processes: the chunks of a round, shared out among forked copies of this process that live for the run.

A worker is a fork: it has the model, the data and the compiled steps already. What changes from round to round, the
rows of a chunk and its minibatches, goes to it through memory that both see, and its results come back the same way.
This process works too; which one takes which chunk changes nothing. There is no pickle: what is in the memory is
tensors, with a line of JSON that says where.

A worker knows the functions that were asked for when it was made. Asked for another, or with rows of another structure,
the team is made anew, once the new steps have been compiled here. Workers end when this process does.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import struct
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie import spans, tree
from coterie.batches import Batches
from coterie.errors import CoterieError
from coterie.tree import Tree

Rows = tuple[tuple[Tree, ...], Batches]
Work = Callable[[Rows], Tree]  # what is done with a chunk
AHEAD = 2  # chunks that lie ready for a worker
_TOKEN = struct.Struct("i")
_LENGTH = struct.Struct("q")
_ALIGN = 64


class Arena:
    """A piece of memory that processes share, for one message at a time; it grows as needed."""

    def __init__(self) -> None:
        self._file = os.memfd_create("coterie")
        self._map: mmap.mmap | None = None

    def write(self, about: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        """What is there more than once is written once: rows that are all the same, a tensor that is given twice."""
        shapes = [list(value.shape) for value in tensors]
        tensors = [value[0] if tree.repeated(value) else value for value in tensors]
        places, at, known = list[int](), 0, dict[Any, tuple[int, Tensor]]()
        for value in tensors:
            key = (value.data_ptr(), value.dtype, value.shape, value.stride())
            if key not in known:
                known[key] = (at, value)
                at += -(-value.numel() * value.element_size() // _ALIGN) * _ALIGN
            places.append(known[key][0])
        layout = [
            [str(value.dtype).removeprefix("torch."), list(value.shape), place, shape]
            for value, place, shape in zip(tensors, places, shapes, strict=True)
        ]
        header = json.dumps({**about, "tensors": layout}).encode()
        body = -(-(_LENGTH.size + len(header)) // _ALIGN) * _ALIGN
        memory = self._mapped(body + at)
        memory[: _LENGTH.size] = _LENGTH.pack(len(header))
        memory[_LENGTH.size : _LENGTH.size + len(header)] = header
        for place, value in known.values():
            _tensor(memory, value.dtype, list(value.shape), body + place).copy_(value)

    def read(self) -> tuple[dict[str, Any], list[Tensor]]:
        """What was written last; the tensors show this memory, so they hold until the next `write`."""
        memory = self._mapped(os.fstat(self._file).st_size)
        (length,) = _LENGTH.unpack(memory[: _LENGTH.size])
        about = json.loads(memory[_LENGTH.size : _LENGTH.size + length])
        body = -(-(_LENGTH.size + length) // _ALIGN) * _ALIGN
        return about, [
            _tensor(memory, getattr(torch, kind), stored, body + at).expand(shape)
            for kind, stored, at, shape in about["tensors"]
        ]

    def _mapped(self, size: int) -> mmap.mmap:
        there = os.fstat(self._file).st_size
        if there < size:
            os.ftruncate(self._file, there := max(size, 2 * there))
        if self._map is None or len(self._map) < there:
            self._map = mmap.mmap(self._file, there)
        return self._map

    def close(self) -> None:
        os.close(self._file)
        self._map = None  # tensors that still show it keep it


def _tensor(memory: mmap.mmap, dtype: torch.dtype, shape: list[int], at: int) -> Tensor:
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=at).view(shape)


class Slot(NamedTuple):
    """A chunk on its way: its rows there, its results back."""

    there: Arena
    back: Arena


@dataclass
class Known:
    """A function that the workers have, and the structure of what it is given."""

    key: object
    work: Work
    like: Rows
    names: tuple[str, ...]


class Team:
    def __init__(self, workers: int) -> None:
        self._owner = os.getpid()
        self._number = workers - 1  # this process is the other one
        self._known: list[Known] = []
        self._workers: dict[int, int] = {}  # pid of each, by the file that it reports to
        self._slots: list[Slot] = []
        self._sink = self._source = -1  # the numbers of slots whose chunks wait for somebody

    @spans.timed("workers")
    def map(self, key: object, work: Work, rows_of: Sequence[Callable[[], Rows]]) -> list[Tree]:
        """`work` of each chunk, in order; they hold until the next call. The same `key` means the same `work`."""
        try:
            return self._map(key, work, rows_of)
        except BaseException:
            self.close()
            raise

    def _map(self, key: object, work: Work, rows_of: Sequence[Callable[[], Rows]]) -> list[Tree]:
        done: dict[int, Tree] = {}
        waiting = deque(range(len(rows_of) - 1))
        last = len(rows_of) - 1
        rows = rows_of[last]()
        known = self._find(key, rows)
        busy: dict[int, int] = {}  # which chunk is in a slot
        if known is None:  # steps are compiled here, once, and not in every worker
            done[last] = work(rows)
            known = self._make(key, work, rows)
        else:  # a worker begins before this process gathers anything for itself
            busy[0] = last
            self._send(0, known, rows)
        free = [slot for slot in range(len(self._slots)) if slot not in busy]
        while len(done) < len(rows_of):
            own = waiting.popleft() if waiting else None
            while waiting and free:
                slot = free.pop()
                busy[slot] = waiting.popleft()
                self._send(slot, known, rows_of[busy[slot]]())
            if own is None and (back := self._take_back()) is not None:
                own = busy.pop(back)
                free.append(back)
            if own is not None:
                done[own] = work(rows_of[own]())
            nothing_else = bool(busy) and not waiting and not self._more()
            for slot in self._reports(wait=nothing_else):
                done[busy.pop(slot)] = self._result(slot, done, copied=bool(waiting))
                free.append(slot)
        return [done[number] for number in range(len(rows_of))]

    def _find(self, key: object, rows: Rows) -> Known | None:
        if not self._workers:
            return None
        names = _names(rows)
        for each in self._known:
            pool = each.like[1]
            if each.key == key and each.names == names and pool.x is rows[1].x and pool.y is rows[1].y:
                return each
        return None

    def _make(self, key: object, work: Work, rows: Rows) -> Known:
        """Workers that know this function, too."""
        self.close()
        parts, batches = rows
        empty = tree.map(lambda leaf: leaf.new_empty(0), (parts, batches[2:]))  # the structure, without what it holds
        known = Known(key, work, (empty[0], Batches(*batches[:2], *empty[1])), _names(rows))
        self._known = [*[each for each in self._known if each.key != key][-8:], known]
        self._slots = [Slot(Arena(), Arena()) for _ in range(AHEAD * self._number)]
        source, self._sink = os.pipe()
        # A description of its own, that does not wait: the workers' one does.
        self._source = os.open(f"/proc/self/fd/{source}", os.O_RDONLY | os.O_NONBLOCK)
        for number in range(self._number):
            report, told = os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # "fork() may deadlock": see can_fork
                child = os.fork()
            if child == 0:
                for file in (self._sink, self._source, report, *self._workers):
                    os.close(file)
                self._work(source, told, number + 1)
            os.close(told)
            self._workers[report] = child
        os.close(source)
        return known

    def _send(self, slot: int, known: Known, rows: Rows) -> None:
        about = {"known": self._known.index(known), "spans": spans.around()}
        self._slots[slot].there.write(about, tree.leaves((rows[0], rows[1][2:])))
        os.write(self._sink, _TOKEN.pack(slot))

    def _take_back(self) -> int | None:
        """A slot whose chunk nobody has begun; it is then nobody's."""
        try:
            token = os.read(self._source, _TOKEN.size)
        except BlockingIOError:
            return None
        return int(_TOKEN.unpack(token)[0])

    def _more(self) -> bool:
        return bool(select.select([self._source], [], [], 0)[0])

    def _reports(self, wait: bool) -> list[int]:
        """The slots whose results are there."""
        ready, _, _ = select.select(list(self._workers), [], [], None if wait else 0)
        slots = []
        for report in ready:
            token = os.read(report, _TOKEN.size)
            if not token:
                self._died(report)
            slots.append(int(_TOKEN.unpack(token)[0]))
        return slots

    def _result(self, slot: int, done: dict[int, Tree], copied: bool) -> Tree:
        """Of a slot; `copied`, if its memory may be wanted for another chunk."""
        about, values = self._slots[slot].back.read()
        if about["error"]:
            raise CoterieError("a worker process failed:\n" + about["error"])
        if about["spans"]:
            spans.add(about["spans"])
        if copied:
            own = {(value.data_ptr(), value.shape): value.clone() for value in values}  # what was given twice still is
            values = [own[value.data_ptr(), value.shape] for value in values]
        each = iter(values)
        return tree.map(lambda _: next(each), next(iter(done.values())))

    def _died(self, report: int) -> None:
        child = self._workers.pop(report)
        os.close(report)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        memory = " (out of memory?)" if code == -signal.SIGKILL else ""
        how = f"was killed by signal {-code}{memory}" if code < 0 else f"ended with code {code}"
        raise CoterieError(f"a worker process {how}: try fewer --workers or less --memory")

    def _work(self, source: int, report: int, number: int) -> None:
        """A worker's whole life; never returns."""
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
            while token := os.read(source, _TOKEN.size):
                there, back = self._slots[_TOKEN.unpack(token)[0]]
                error, recorded, results = "", None, list[Tensor]()
                try:
                    about, values = there.read()
                    spans.begin_worker(number, about["spans"])
                    known = self._known[about["known"]]
                    each = iter(values)
                    parts, rest = tree.map(lambda _: next(each), (known.like[0], known.like[1][2:]))  # noqa: B023
                    results = tree.leaves(known.work((parts, Batches(*known.like[1][:2], *rest))))
                    recorded = spans.taken()
                except BaseException:
                    error = traceback.format_exc()
                back.write({"error": error, "spans": recorded}, results)
                os.write(report, token)
        finally:
            os._exit(0)

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        for report, child in self._workers.items():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            os.close(report)
        for file in (self._sink, self._source):
            if file >= 0:
                os.close(file)
        for slot in self._slots:
            slot.there.close()
            slot.back.close()
        self._workers, self._slots, self._sink, self._source = {}, [], -1, -1

    def __del__(self) -> None:
        if os.getpid() == self._owner:  # a fork's copy of a team is not its own
            self.close()


def _names(rows: Rows) -> tuple[str, ...]:
    return tuple(tree.pack(rows[0]))
