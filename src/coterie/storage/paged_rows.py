"""Rows of many clients, of which few change in a round: so many bytes of them are in memory, the rest is in files.

`Paged` stands for a tree whose leaves are [clients, ...], and is a value like one: `put` gives a new one and leaves the
old as it was. Nothing is copied for that, since
- a client that never changed has no row of its own but the first one's, which all begin with;
- what is put together is kept together, as a `Segment` that never changes; old and new value share all others;
- a segment that nobody refers to any more is dropped, and one of which few rows still count is merged into the next.
A `Store` keeps the segments of a run within a number of bytes: beyond it the oldest ones are written to a file, of
safetensors layout, from which single rows are read.

`take` and `put` are for rows of either kind, paged or a tree in memory.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from coterie import tree
from coterie.errors import CheckpointError
from coterie.tree import Params, Tree

T = TypeVar("T")
Bytes = NDArray[np.uint8]
Form = dict[str, tuple[int, int]]  # of matrices that are named by their type: their shapes
SMALL = 64 * 2**20  # bytes of rows that are not worth paging
SPARSE = 4  # a segment is merged when less than one in so many of its rows count
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's names for them
TRIMMED = 100  # times that rows are put, between two times that the heap is trimmed
FIRST = -1  # the number of the segment that all clients begin with


class Held:
    """Matrices in memory, named by their type."""

    def __init__(self, flat: Params) -> None:
        self.flat = flat
        self.form: Form = {name: (matrix.shape[0], matrix.shape[1]) for name, matrix in flat.items()}
        self._bytes = {name: _bytes(matrix) for name, matrix in flat.items()}

    def row(self, name: str, row: int) -> Bytes:
        out: Bytes = self._bytes[name][row]
        return out


class Filed:
    """Matrices that `save_file` wrote.

    Rows are read, not mapped: a mapping has to be filled and emptied page by page, for what is wanted once. Forked
    workers may read from the same file, since where one of them reads is no part of it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        begin = 8 + int.from_bytes(self._read(0, 8).tobytes(), "little")
        about = json.loads(self._read(8, begin - 8).tobytes())
        about.pop("__metadata__", None)
        self.form: Form = {name: tuple(each["shape"]) for name, each in about.items()}
        self._start = {name: begin + each["data_offsets"][0] for name, each in about.items()}
        self._width = {name: numbers * _type(name).itemsize for name, (_, numbers) in self.form.items()}

    @property
    def flat(self) -> Params:
        return {name: self._matrix(name, *shape) for name, shape in self.form.items()}

    def row(self, name: str, row: int) -> Bytes:
        return self._read(self._start[name] + row * self._width[name], self._width[name])

    def _matrix(self, name: str, rows: int, numbers: int) -> Tensor:
        matrix = _apart(rows, numbers, _type(name))
        for row, into in enumerate(_bytes(matrix)):
            into[:] = self.row(name, row)
        return matrix

    def _read(self, start: int, count: int) -> Bytes:
        out, done = np.empty(count, np.uint8), 0
        while done < count:  # what is read at once may be less, and is at most 2 GB
            got = os.preadv(self._file, [out[done:].data], start + done)
            if not got:
                raise CheckpointError(f"clients' states cannot be read: '{self._path}' is shorter than it was")
            done += got
        return out


class Segment:
    """Rows that were put together: one matrix [rows, numbers] for each type of number, in memory or in a file."""

    def __init__(self, rows: Held | Filed, file: Path | None = None, checksum: str = "") -> None:
        self.rows = rows
        self.file, self.checksum = file, checksum  # in a run folder, once it is part of a checkpoint
        self.size = next(iter(rows.form.values()))[0]
        self.nbytes = sum(size * numbers * _type(name).itemsize for name, (size, numbers) in rows.form.items())

    @property
    def held(self) -> bool:
        return isinstance(self.rows, Held)

    def page_out(self, folder: Path | None) -> None:
        """To its file, if it has one, or to one without a name, which is gone when nobody reads it any more."""
        if self.file is not None and self.file.exists():
            self.rows = Filed(self.file)
            return
        handle, name = tempfile.mkstemp(prefix=".rows-", suffix=".tmp", dir=folder)
        os.close(handle)
        try:
            save_file(self.rows.flat, name)
            self.rows = Filed(Path(name))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"clients' states cannot be written to '{Path(name).parent}': {error}") from error
        finally:
            Path(name).unlink(missing_ok=True)


class Store:
    """Where the segments of a run are: up to `memory` bytes of them in memory, the others in files in `folder`."""

    def __init__(self, memory: int, folder: Path | None = None) -> None:
        self.memory, self.folder = memory, folder
        self._segments: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()
        self._number = itertools.count()

    def rows(self, first: Tree, size: int) -> Any:
        """`first` in every one of `size` rows: paged, if that is worth it."""
        if not self.pages(tree.nbytes(first) * size):
            return tree.clone(tree.broadcast(first, size))
        home = torch.tensor([[FIRST, 0]], device="cpu").repeat(size, 1)
        return Paged(self, first, home, {FIRST: Segment(Held(flatten(tree.broadcast(first, 1))))})

    def pages(self, nbytes: int) -> bool:
        return nbytes > min(SMALL, self.memory // 2)

    def keep(self, segment: Segment) -> Segment:
        number = next(self._number)
        self._segments[number] = segment
        if number % TRIMMED == TRIMMED - 1:
            _trim()
        held = [each for each in self._segments.values() if each.held]  # the oldest first
        excess = sum(each.nbytes for each in held) - self.memory
        for each in held:
            if excess <= 0:
                break
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
            each.page_out(self.folder)
            excess -= each.nbytes
        return segment


@dataclass(frozen=True)
class Paged:
    store: Store
    first: Tree  # the row that all clients begin with
    home: Tensor  # [clients, 2]; each one's segment and its row there
    segments: dict[int, Segment] = field(repr=False)

    def __len__(self) -> int:
        return len(self.home)

    def take(self, ids: Tensor) -> Tree:
        def empty(leaf: Tensor) -> Tensor:
            return torch.empty(len(ids), *leaf.shape, dtype=leaf.dtype, device="cpu")

        out = tree.map(empty, self.first)
        parts = _side_by_side(out)
        for place, (number, row) in enumerate(self.home[ids.cpu()].tolist()):
            segment = self.segments[number].rows
            for name, leaves in parts.items():
                whole, end = segment.row(name, row), 0
                for leaf in leaves:
                    begin, end = end, end + leaf.shape[1]
                    leaf[place] = whole[begin:end]
        return tree.map(lambda leaf, like: leaf.to(like.device), out, self.first)

    def put(self, ids: Tensor, new: Tree) -> Paged:
        home, number = self.home.clone(), max(self.segments) + 1
        home[ids.cpu()] = _places(number, 0, len(ids))
        found = np.unique(home[:, 0].numpy(), return_counts=True)
        count: dict[int, int] = dict(zip(*(each.tolist() for each in found), strict=True))
        used = {old: each for old, each in self.segments.items() if old == FIRST or old in count}
        sparse = [old for old, each in used.items() if old != FIRST and count[old] * SPARSE < each.size]
        moved = torch.isin(home[:, 0], torch.tensor(sparse, dtype=home.dtype, device="cpu")).nonzero().flatten()
        flat = flatten(new, len(moved))
        for name, matrix in flat.items():
            for into, (old, row) in zip(_bytes(matrix)[len(ids) :], home[moved].tolist(), strict=True):
                into[:] = used[old].rows.row(name, row)
        home[moved] = _places(number, len(ids), len(moved))
        kept = {old: each for old, each in used.items() if old not in sparse}
        return Paged(self.store, self.first, home, kept | {number: self.store.keep(Segment(Held(flat)))})

    def resized(self, size: int) -> Paged:
        """With more clients, who begin as all did."""
        more = torch.tensor([[FIRST, 0]], device="cpu").repeat(size - len(self), 1)
        return Paged(self.store, self.first, torch.cat([self.home, more]), self.segments)


def take(rows: Any, ids: Tensor | int) -> Tree:
    """The rows `ids` (copied), or one row without its client axis."""
    if not isinstance(rows, Paged):
        return tree.rows(rows, ids)
    if isinstance(ids, Tensor):
        return rows.take(ids)
    return tree.rows(rows.take(torch.tensor([ids], device="cpu")), 0)


def put(rows: T, ids: Tensor, new: Tree) -> T:
    """The same rows but for those of `ids`, which are `new`."""
    return rows.put(ids, new) if isinstance(rows, Paged) else tree.put(rows, ids, new)  # type: ignore[return-value]


def mean(rows: Any, weights: Tensor) -> Tree:
    """`tree.mean` of all rows."""
    if not isinstance(rows, Paged):
        return tree.mean(rows, weights)
    some = torch.split(weights.nonzero().flatten(), max(1, rows.store.memory // (4 * tree.nbytes(rows.first))))
    parts = tree.stack([tree.mean(rows.take(ids), weights[ids]) for ids in some])
    return tree.mean(parts, torch.stack([weights[ids].double().sum() for ids in some]))


def walk(node: Tree, change: Callable[[str, Any], Any], path: str = "") -> Tree:
    """A tree, some of whose leaves may be `Paged`, with every leaf changed; its path is the one of `tree.pack`."""
    if isinstance(node, dict):
        return {name: walk(child, change, f"{path}/{name}".lstrip("/")) for name, child in node.items()}
    if isinstance(node, tuple):
        names = getattr(node, "_fields", range(len(node)))
        parts = [walk(child, change, f"{path}/{name}".lstrip("/")) for name, child in zip(names, node, strict=True)]
        return type(node)(*parts) if hasattr(node, "_fields") else tuple(parts)
    return change(path, node)


def flatten(rows: Tree, more: int = 0) -> Params:
    """The leaves of all rows side by side, those of one type together: {type: [rows + more, numbers]}."""
    groups: dict[str, list[Tensor]] = {}
    for leaf in tree.leaves(rows):
        groups.setdefault(_name(leaf), []).append(leaf.detach().cpu().reshape(len(leaf), -1))
    flat = {}
    for name, parts in groups.items():
        size = len(parts[0])
        flat[name] = _apart(size + more, sum(part.shape[1] for part in parts), parts[0].dtype)
        torch.cat(parts, 1, out=flat[name][:size])
    return flat


@functools.cache
def keep_memory() -> None:
    """From now on, what a round frees is there for the next one.

    By default, glibc gives every piece of some size back to the system at once, and each round then begins with the
    system clearing pages: a sixth of the time of a network with 80,000 parameters and 20 clients.
    """
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(MMAP_THRESHOLD, 32 * 2**20)  # larger ones are still on their own
        libc.mallopt(TRIM_THRESHOLD, 128 * 2**20)


def _trim() -> None:
    """Give the heap's holes back to the system. It costs the rounds after it tens of milliseconds, so not in each."""
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _apart(rows: int, numbers: int, dtype: torch.dtype) -> Tensor:
    """An empty matrix in memory of its own, which the system has back at once when it is dropped.

    Rows stay for some rounds. On the heap they would lie among all that a round needs for a moment, and what is freed
    around them does not fit what is asked for next: the process would grow to a multiple of what it holds, or the heap
    had to be given back in every round and asked for again, which takes a quarter of a round.
    """
    count = rows * numbers
    if not count:
        return torch.empty(rows, numbers, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, count * dtype.itemsize, access=mmap.ACCESS_COPY)  # not shared with workers
    return torch.frombuffer(memory, dtype=dtype, count=count).view(rows, numbers)


def _places(number: int, start: int, count: int) -> Tensor:
    rows = torch.arange(start, start + count, device="cpu")  # wherever the models are
    return torch.stack([torch.full_like(rows, number), rows], 1)


def _side_by_side(rows: Tree) -> dict[str, list[Bytes]]:
    """The bytes of each leaf of `rows`, by the matrix of `flatten` and in the order in which they are there."""
    parts: dict[str, list[Bytes]] = {}
    for leaf in tree.leaves(rows):
        parts.setdefault(_name(leaf), []).append(_bytes(leaf.view(len(leaf), leaf[:1].numel())))
    return parts


def _bytes(matrix: Tensor) -> Bytes:
    """[rows, bytes], the same memory: NumPy does not know all of PyTorch's types."""
    return matrix.view(torch.uint8).numpy()


def _name(leaf: Tensor) -> str:
    return str(leaf.dtype).removeprefix("torch.")


def _type(name: str) -> torch.dtype:
    return getattr(torch, name)  # type: ignore[no-any-return]
