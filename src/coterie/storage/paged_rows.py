"""Rows of many clients, of which few change in a round. A limited number of bytes is in memory, the rest in files.

`Paged` stands for a tree whose leaves are [clients, ...]. It is a value like one: `put` returns a new one and leaves
the old one as it was. That copies nothing, because
- a client that never changed has no row of its own: it refers to the row that all clients begin with;
- rows that were put together are kept together, as a `Segment`. A segment never changes, so old and new value share it;
- a segment that nobody refers to is dropped, and one of which few rows are still current is merged into the next one.
A `Store` keeps the segments of a run within a number of bytes. Beyond it, the oldest segments are written to files in
safetensors layout, from which single rows are read.

`coterie.core.client_rows.take` and `put` work on rows of either kind, paged or a tree in memory.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from coterie.core import tree
from coterie.core.client_rows import ClientRows
from coterie.core.errors import CheckpointError
from coterie.core.tree import Params, Tree

Bytes = NDArray[np.uint8]
Shapes = dict[str, tuple[int, int]]  # of matrices; a matrix is named by the type of its numbers
UNPAGED_BYTES = 64 * 2**20  # rows of fewer bytes in all are not worth paging
MIN_CURRENT_SHARE = 1 / 4  # of a segment's rows; a segment with fewer is merged into the next one
FIRST = -1  # the number of the segment with the row that all clients begin with


class InMemory:
    """The matrices of a segment, in memory."""

    def __init__(self, flat: Params) -> None:
        self.flat = flat
        self.shapes: Shapes = {name: (matrix.shape[0], matrix.shape[1]) for name, matrix in flat.items()}
        self._bytes = {name: _bytes(matrix) for name, matrix in flat.items()}

    def row(self, name: str, row: int) -> Bytes:
        """Return the bytes of one row; they are not copied."""
        out: Bytes = self._bytes[name][row]
        return out


class InFile:
    """The matrices of a segment, in a file that `save_file` wrote.

    Rows are read and not mapped: the system would fill and empty a mapping page by page, for what is wanted once.
    Forked workers may share the open file, since every read says where it begins.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        begin = 8 + int.from_bytes(self._read(0, 8).tobytes(), "little")
        about = json.loads(self._read(8, begin - 8).tobytes())
        about.pop("__metadata__", None)
        self.shapes: Shapes = {name: tuple(each["shape"]) for name, each in about.items()}
        self._start = {name: begin + each["data_offsets"][0] for name, each in about.items()}
        self._width = {name: numbers * _type(name).itemsize for name, (_, numbers) in self.shapes.items()}

    @property
    def flat(self) -> Params:
        """The matrices, read into memory."""
        return {name: self._matrix(name, *shape) for name, shape in self.shapes.items()}

    def row(self, name: str, row: int) -> Bytes:
        """Read the bytes of one row.

        Raises:
            CheckpointError: the file is shorter than it was.
        """
        return self._read(self._start[name] + row * self._width[name], self._width[name])

    def _matrix(self, name: str, rows: int, numbers: int) -> Tensor:
        matrix = _own_memory(rows, numbers, _type(name))
        for row, into in enumerate(_bytes(matrix)):
            into[:] = self.row(name, row)
        return matrix

    def _read(self, start: int, count: int) -> Bytes:
        out, done = np.empty(count, np.uint8), 0
        while done < count:  # one call may read less, and reads at most 2 GB
            got = os.preadv(self._file, [out[done:].data], start + done)
            if not got:
                raise CheckpointError(f"clients' states cannot be read: '{self._path}' is shorter than it was")
            done += got
        return out


class Segment:
    """Rows that were put together, as one matrix [rows, numbers] for each type of number, in memory or in a file."""

    def __init__(self, rows: InMemory | InFile, file: Path | None = None, checksum: str = "") -> None:
        self.rows = rows
        self.file, self.checksum = file, checksum  # of the run folder, once a checkpoint needs it
        self.size = next(iter(rows.shapes.values()))[0]
        self.nbytes = sum(size * numbers * _type(name).itemsize for name, (size, numbers) in rows.shapes.items())

    @property
    def in_memory(self) -> bool:
        return isinstance(self.rows, InMemory)

    def page_out(self, folder: Path | None) -> None:
        """Leave memory for the checkpoint's file or, if there is none, for a file without a name.

        The latter is gone when nobody has it open any more.

        Args:
            folder: where to make the file; None: in the system's folder for temporary files.

        Raises:
            CheckpointError: the file cannot be written.
        """
        if self.file is not None and self.file.exists():
            self.rows = InFile(self.file)
            return
        handle, name = tempfile.mkstemp(prefix=".rows-", suffix=".tmp", dir=folder)
        os.close(handle)
        try:
            save_file(self.rows.flat, name)
            self.rows = InFile(Path(name))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"clients' states cannot be written to '{Path(name).parent}': {error}") from error
        finally:
            Path(name).unlink(missing_ok=True)


class Store:
    """Keeps the segments of a run.

    Args:
        memory: how many bytes of them may be in memory.
        folder: where the files of the others are; None: in the system's folder for temporary files.
    """

    def __init__(self, memory: int, folder: Path | None = None) -> None:
        self.memory, self.folder = memory, folder
        self._segments: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()
        self._number = itertools.count()

    def rows(self, first: Tree, size: int) -> Any:
        """Return `size` rows that are all `first`: `Paged` if they are large, else a tree."""
        if not self.pages(tree.nbytes(first) * size):
            return tree.clone(tree.broadcast(first, size))
        home = torch.tensor([[FIRST, 0]], device="cpu").repeat(size, 1)
        return Paged(self, first, home, {FIRST: Segment(InMemory(flatten(tree.broadcast(first, 1))))})

    def pages(self, nbytes: int) -> bool:
        """Tell whether rows of so many bytes in all are paged."""
        return nbytes > min(UNPAGED_BYTES, self.memory // 2)

    def keep(self, segment: Segment) -> Segment:
        """Count this segment too, and write the oldest ones to files if they are now too many; return the segment."""
        self._segments[next(self._number)] = segment
        loaded = [each for each in self._segments.values() if each.in_memory]  # the oldest first
        excess = sum(each.nbytes for each in loaded) - self.memory
        for each in loaded:
            if excess <= 0:
                break
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
            each.page_out(self.folder)
            excess -= each.nbytes
        return segment


@dataclass(frozen=True)
class Paged(ClientRows):
    """Rows of all clients, each of which is a row of some segment."""

    store: Store
    first: Tree  # the row that all clients begin with
    home: Tensor  # [clients, 2]; the number of each one's segment, and its row there
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
        sparse = [old for old, each in used.items() if old != FIRST and count[old] < MIN_CURRENT_SHARE * each.size]
        moved = torch.isin(home[:, 0], torch.tensor(sparse, dtype=home.dtype, device="cpu")).nonzero().flatten()
        flat = flatten(new, len(moved))
        for name, matrix in flat.items():
            for into, (old, row) in zip(_bytes(matrix)[len(ids) :], home[moved].tolist(), strict=True):
                into[:] = used[old].rows.row(name, row)
        home[moved] = _places(number, len(ids), len(moved))
        kept = {old: each for old, each in used.items() if old not in sparse}
        return Paged(self.store, self.first, home, kept | {number: self.store.keep(Segment(InMemory(flat)))})

    def mean(self, weights: Tensor) -> Tree:
        some = torch.split(weights.nonzero().flatten(), max(1, self.store.memory // (4 * tree.nbytes(self.first))))
        parts = tree.stack([tree.mean(self.take(ids), weights[ids]) for ids in some])
        return tree.mean(parts, torch.stack([weights[ids].double().sum() for ids in some]))

    def resized(self, size: int) -> Paged:
        """Return the rows of `size` clients: the new ones begin as all did."""
        more = torch.tensor([[FIRST, 0]], device="cpu").repeat(size - len(self), 1)
        return Paged(self.store, self.first, torch.cat([self.home, more]), self.segments)


def walk(node: Tree, change: Callable[[str, Any], Any], path: str = "") -> Tree:
    """Return a tree, some of whose leaves may be `Paged`, with every leaf replaced by `change(path, leaf)`.

    Paths are those of `tree.pack`.
    """
    if isinstance(node, dict):
        return {name: walk(child, change, f"{path}/{name}".lstrip("/")) for name, child in node.items()}
    if isinstance(node, tuple):
        names = getattr(node, "_fields", range(len(node)))
        parts = [walk(child, change, f"{path}/{name}".lstrip("/")) for name, child in zip(names, node, strict=True)]
        return type(node)(*parts) if hasattr(node, "_fields") else tuple(parts)
    return change(path, node)


def flatten(rows: Tree, more: int = 0) -> Params:
    """Put the leaves of all rows side by side, those of one type together, and leave room for `more` rows.

    Returns:
        {name of the type: [rows + more, numbers]}
    """
    groups: dict[str, list[Tensor]] = {}
    for leaf in tree.leaves(rows):
        groups.setdefault(_name(leaf), []).append(leaf.detach().cpu().reshape(len(leaf), -1))
    flat = {}
    for name, parts in groups.items():
        size = len(parts[0])
        flat[name] = _own_memory(size + more, sum(part.shape[1] for part in parts), parts[0].dtype)
        torch.cat(parts, 1, out=flat[name][:size])
    return flat


def _own_memory(rows: int, numbers: int, dtype: torch.dtype) -> Tensor:
    """Return an empty matrix in memory of its own, which goes back to the system when the matrix is dropped.

    Rows stay for some rounds. On the heap they would lie among all that a round needs for a moment only, and the holes
    around them would not fit what is asked for next: the process would grow to a multiple of what it holds.
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
    """Return the bytes of each leaf of `rows`, by the matrix of `flatten` that it is in and in the order there."""
    parts: dict[str, list[Bytes]] = {}
    for leaf in tree.leaves(rows):
        parts.setdefault(_name(leaf), []).append(_bytes(leaf.view(len(leaf), leaf[:1].numel())))
    return parts


def _bytes(matrix: Tensor) -> Bytes:
    """Show a matrix as [rows, bytes], in the same memory: NumPy does not know all of PyTorch's types."""
    return matrix.view(torch.uint8).numpy()


def _name(leaf: Tensor) -> str:
    return str(leaf.dtype).removeprefix("torch.")


def _type(name: str) -> torch.dtype:
    return getattr(torch, name)  # type: ignore[no-any-return]
