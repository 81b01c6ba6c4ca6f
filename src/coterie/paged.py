"""Rows of many clients, of which few change in a round: so many bytes of them are in memory, the rest is in files.

`Paged` stands for a tree whose leaves are [clients, ...], and is a value like one: `put` gives a new one and leaves the
old as it was. Nothing is copied for that, since
- a client that never changed has no row of its own but the first one's, which all begin with;
- what is put together is kept together, as a `Segment` that never changes; old and new value share all others;
- a segment that nobody refers to any more is dropped, and one of which few rows still count is merged into the next.
A `Store` keeps the segments of a run within a number of bytes: beyond it the oldest ones are written to a file, of
safetensors layout, and mapped into memory. Pages are given back as soon as they are read.

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
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from coterie import tree
from coterie.errors import CheckpointError
from coterie.tree import Params, Tree

T = TypeVar("T")
SMALL = 64 * 2**20  # bytes of rows that are not worth paging
SPARSE = 4  # a segment is merged when less than one in so many of its rows count
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's names for them
FIRST = -1  # the number of the segment that all clients begin with


class Segment:
    """Rows that were put together: one matrix [rows, numbers] for each type of number."""

    def __init__(self, flat: Params, file: Path | None = None, checksum: str = "") -> None:
        self.flat = flat
        self.file, self.checksum = file, checksum  # in a run folder, once it is part of a checkpoint
        self.size = len(next(iter(flat.values())))
        self.nbytes = tree.nbytes(flat)
        self.map: mmap.mmap | None = None

    @classmethod
    def mapped(cls, path: Path, checksum: str = "") -> Segment:
        found, flat = _map(path)
        segment = cls(flat, path, checksum)
        segment.map = found
        return segment

    def page_out(self, folder: Path | None) -> None:
        """To its file, if it has one, or to one without a name, which is gone when nobody reads it any more."""
        if self.file is not None and self.file.exists():
            self.map, self.flat = _map(self.file)
            return
        handle, name = tempfile.mkstemp(prefix=".rows-", suffix=".tmp", dir=folder)
        os.close(handle)
        try:
            save_file(self.flat, name)
            self.map, self.flat = _map(Path(name))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"clients' states cannot be written to '{Path(name).parent}': {error}") from error
        finally:
            Path(name).unlink(missing_ok=True)

    def release(self) -> None:
        """Give back the memory of what was read; the file still has it."""
        if self.map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED)


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
        return Paged(self, first, home, {FIRST: Segment(flatten(tree.broadcast(first, 1)))})

    def pages(self, nbytes: int) -> bool:
        return nbytes > min(SMALL, self.memory // 2)

    def keep(self, segment: Segment) -> Segment:
        self._segments[next(self._number)] = segment
        held = [each for each in self._segments.values() if each.map is None]  # the oldest first
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

    def row(self, client: int) -> Tree:
        number, row = self.home[client].tolist()
        segment = self.segments[number]
        out = tree.rows(unflatten(segment.flat, slice(row, row + 1), self.first), 0)
        segment.release()
        return out

    def take(self, ids: Tensor) -> Tree:
        numbers, rows = self.home[ids.cpu()].unbind(1)
        numbers, order = numbers.sort(stable=True)
        found, counts = (each.tolist() for each in np.unique(numbers.numpy(), return_counts=True))
        if len(found) == 1:
            segment = self.segments[found[0]]
            out = unflatten(segment.flat, rows, self.first)
            segment.release()
            return out
        like = self.segments[FIRST].flat
        near = {name: matrix.new_empty(len(ids), matrix.shape[1]) for name, matrix in like.items()}
        at = 0
        for number, piece in zip(found, torch.split(rows[order], counts), strict=True):
            segment = self.segments[number]
            for name, matrix in near.items():
                torch.index_select(segment.flat[name], 0, piece, out=matrix[at : at + len(piece)])
            segment.release()
            at += len(piece)
        return unflatten(near, order.argsort(), self.first)

    def put(self, ids: Tensor, new: Tree) -> Paged:
        home, number = self.home.clone(), max(self.segments) + 1
        home[ids.cpu()] = _places(number, 0, len(ids))
        found = np.unique(home[:, 0].numpy(), return_counts=True)
        count: dict[int, int] = dict(zip(*(each.tolist() for each in found), strict=True))
        used = {old: each for old, each in self.segments.items() if old == FIRST or old in count}
        sparse = [old for old, each in used.items() if old != FIRST and count[old] * SPARSE < each.size]
        moved = [(home[:, 0] == old).nonzero().flatten() for old in sparse]
        flat, at = flatten(new, sum(map(len, moved))), len(ids)
        for old, clients in zip(sparse, moved, strict=True):
            segment, end = self.segments[old], at + len(clients)
            for name, matrix in flat.items():
                torch.index_select(segment.flat[name], 0, home[clients, 1], out=matrix[at:end])
            segment.release()
            home[clients] = _places(number, at, len(clients))
            at = end
        kept = {old: each for old, each in used.items() if old not in sparse}
        return Paged(self.store, self.first, home, kept | {number: self.store.keep(Segment(flat))})

    def resized(self, size: int) -> Paged:
        """With more clients, who begin as all did."""
        more = torch.tensor([[FIRST, 0]], device="cpu").repeat(size - len(self), 1)
        return Paged(self.store, self.first, torch.cat([self.home, more]), self.segments)


def take(rows: Any, ids: Tensor | int) -> Tree:
    """The rows `ids` (copied), or one row without its client axis."""
    if not isinstance(rows, Paged):
        return tree.rows(rows, ids)
    return rows.take(ids) if isinstance(ids, Tensor) else rows.row(ids)


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
        groups.setdefault(str(leaf.dtype).removeprefix("torch."), []).append(leaf.detach().cpu().reshape(len(leaf), -1))
    flat = {}
    for name, parts in groups.items():
        size = len(parts[0])
        flat[name] = _apart(size + more, sum(part.shape[1] for part in parts), parts[0].dtype)
        torch.cat(parts, 1, out=flat[name][:size])
    return flat


def unflatten(flat: Params, ids: Tensor | slice, like: Tree) -> Tree:
    """The rows `ids` of `flat` (copied), each in the form of `like`."""
    start = dict.fromkeys(flat, 0)

    def part(leaf: Tensor) -> Tensor:
        name = str(leaf.dtype).removeprefix("torch.")
        begin, start[name] = start[name], start[name] + leaf.numel()
        part = flat[name][:, begin : start[name]][ids]
        part = part.clone() if isinstance(ids, slice) else part
        return part.reshape(len(part), *leaf.shape).to(leaf.device)

    return tree.map(part, like)


@functools.cache
def keep_memory() -> None:
    """From now on, what a round frees is there for the next one.

    By default, glibc gives every piece of some size back to the system at once, and each round then begins with the
    system clearing pages: a sixth of the time of a network with 80,000 parameters and 20 clients.
    """
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(MMAP_THRESHOLD, 32 * 2**20)  # larger ones are still on their own
        libc.mallopt(TRIM_THRESHOLD, 128 * 2**20)


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


def _map(path: Path) -> tuple[mmap.mmap, Params]:
    """A file that `save_file` wrote from matrices that are named by their type, without reading it."""
    with path.open("rb") as file:
        found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # of which nothing is written: see `Segment`
    begin = 8 + int.from_bytes(found[:8], "little")
    flat = {}
    for name, about in json.loads(found[8:begin]).items():
        if name != "__metadata__":
            count, offset = about["shape"][0] * about["shape"][1], begin + about["data_offsets"][0]
            numbers = torch.frombuffer(found, dtype=getattr(torch, name), count=count, offset=offset)
            flat[name] = numbers.view(about["shape"])
    return found, flat
