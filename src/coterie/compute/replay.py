"""A scan without Python between its steps: C++ repeats what a compiled step did.

Called from Python, a compiled step of a small network spends more time on making and checking tensors than on numbers.
But the code that TorchInductor writes does the same in every step: it calls kernels and matrix products on memory that
only changes its place. So `coterie.compute.recording` records one call, as a list of operations on *operands*, and
`replay.cpp` repeats the list with another row of pointers in every step. Within a scan there is no Python, no new
tensor and no library call.

- Each client takes its own steps, on one core, and threads take the clients, the largest first. Nothing is stacked or
  padded, and what a client gets depends on nobody else, bit for bit.
- A leaf of the carry that a step writes anew has two places, and steps go to and fro between them.
- Matrix products are our own: MKL is made for large ones, and those of a minibatch are small and many.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.compute import entries
from coterie.compute.entries import load_library, save_library
from coterie.compute.inductor import compile_source
from coterie.compute.step_key import machine

SOURCE = Path(__file__).with_name("replay.cpp")
OP_FIELDS = 22  # numbers in an Op of replay.cpp
KERNEL, PRODUCT, READ = range(3)  # kinds of Ops
NUM_READS, POOL_LENGTH = 2, 6  # the first Ops read x and y; the field in which they have the length of the pool
FEW_ARGUMENTS, MAX_ARGUMENTS = 32, 128  # replay.cpp calls every kernel with so many pointers; it ignores the surplus

Pool = tuple[Tensor, Tensor]  # x and y of all examples


class Kernel(NamedTuple):
    """A function of a library that TorchInductor made."""

    file: str
    name: str


class ClientSteps(NamedTuple):
    """The minibatches of all clients, and whose they are."""

    parts: NDArray[np.int64]  # [clients, 3]: client, first step, end; those that come first are begun first
    batches: Sequence[Tensor]  # positions in the pool, mask and key; [steps, ...], contiguous


@dataclass(frozen=True)
class ReplayedStep:
    """A recorded step that `replay.cpp` repeats."""

    ops: NDArray[np.int64]  # [operations, OP_FIELDS]
    owner: NDArray[np.int64]  # of each operand: the number of an input, or of a buffer after them
    offset: NDArray[np.int64]  # of each operand: bytes from the start of that memory
    buffers: list[torch.UntypedStorage]  # what the step uses beside its inputs
    num_inputs: int
    swaps: dict[int, int]  # {leaf of the carry: the buffer that is its other place}
    kernels: dict[int, Kernel] = field(default_factory=dict)  # by address
    has_constants: bool = False  # whether some of the buffers have values that the step reads
    _rooms: list[list[torch.UntypedStorage]] = field(default_factory=list, repr=False)  # buffers of further threads
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)  # one scan at a time

    @functools.cached_property
    def width(self) -> int:
        """The length of a row of pointers, with room for the surplus that kernels are handed."""
        most = (FEW_ARGUMENTS if number <= FEW_ARGUMENTS else MAX_ARGUMENTS for number in self.ops[:, 3])
        return max(int(first) + surplus for first, surplus in zip(self.ops[:, 2], most, strict=True))

    def scan(
        self, start: Sequence[Tensor], aux: Sequence[Tensor], pool: Pool, steps: ClientSteps, threads: int = 1
    ) -> tuple[list[Tensor], list[list[int]]]:
        """Take the steps of all clients.

        Args:
            start: the carry to begin with, [clients, ...]; each row is contiguous. It is not changed.
            aux: what steps read beside, likewise.
            pool: all examples.
            steps: the clients' minibatches.
            threads: how many clients take their steps at the same time.

        Returns:
            The carry after the last step, [clients, ...], and when each thread began and ended, in nanoseconds.
        """
        done = [leaf.new_empty(leaf.shape) for leaf in start]
        parts, batches = steps
        owners = self.num_inputs + len(self.buffers)
        per_client, per_step = np.zeros((2, owners), np.int64), np.zeros((1, owners), np.int64)
        per_client[:, : len(done) + len(aux)] = [_row_bytes(leaf) for leaf in (*done, *aux)]
        for leaf, place in self.swaps.items():  # in odd steps, its two places are exchanged
            per_client[1, leaf], per_client[1, place] = 0, per_client[0, leaf]
        per_step[0, self.num_inputs - len(batches) : self.num_inputs] = [_row_bytes(part) for part in batches]
        leaves = [
            (old.data_ptr(), _row_bytes(old), new.data_ptr(), new.nbytes // len(new))
            for old, new in zip(start, done, strict=True)
        ]
        arrays = (self.ops, self._operands(per_client), self._operands(per_step), parts, np.array(leaves, np.int64))
        ops, *where = (array.ctypes.data for array in arrays)
        given = [ops, len(self.ops), self.width, *where[:2], where[2], len(parts), where[3], len(leaves)]
        threads = max(1, min(threads, len(parts)))
        about, times = np.array(given, np.int64), np.zeros((threads, 2), np.int64)  # all arrays live until C++ is done
        with self._lock:
            rooms = [self._room(number, done, (*aux, *pool, *batches)) for number in range(threads)]
            places = np.array([[array.ctypes.data for array in room[:2]] for room in rooms], np.int64)
            self.ops[:NUM_READS, POOL_LENGTH] = [len(part) for part in pool]
            wrong = library().scan(about.ctypes.data, places.ctypes.data, threads, times.ctypes.data)
        if wrong:
            raise RuntimeError(wrong.decode())
        return done, times.tolist()

    def _operands(self, owners: NDArray[np.int64], offset: NDArray[np.int64] | int = 0) -> NDArray[np.int64]:
        """Expand values of each memory, [n, memories], to values of each operand, [n, width]."""
        found = np.zeros((len(owners), self.width), np.int64)
        found[:, : len(self.owner)] = owners[:, self.owner] + offset
        return found

    def _room(self, number: int, done: Sequence[Tensor], given: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return what a thread has to itself.

        That is: where the operands are in even and in odd steps, the other places of the carry (0: it has none), and
        the tensors that keep these alive.
        """
        while len(self._rooms) < number:
            own = {storage.data_ptr(): storage.clone() for storage in self.buffers}  # type: ignore[no-untyped-call]
            self._rooms.append([own[storage.data_ptr()] for storage in self.buffers])
        buffers = self._rooms[number - 1] if number else self.buffers
        where = np.zeros((2, self.num_inputs + len(buffers)), np.int64)
        where[:] = [leaf.data_ptr() for leaf in (*done, *given)] + [storage.data_ptr() for storage in buffers]
        held = {leaf: torch.empty_like(done[leaf][0]) for leaf in self.swaps}
        others = np.zeros(len(done), np.int64)
        for leaf, place in self.swaps.items():
            others[leaf] = where[0, place] = where[1, leaf] = held[leaf].data_ptr()
            where[1, place] = where[0, leaf]
        return self._operands(where, self.offset), others, held


def _row_bytes(leaf: Tensor) -> int:
    """Return how many bytes lie between rows: none, where all rows are the same memory."""
    return leaf.stride(0) * leaf.element_size()


@functools.cache
def is_kept() -> bool:
    """Tell whether replay.cpp was compiled for this machine before, and is on disk."""
    return entries.entry_path(f"replay-{machine()}").exists()


def library() -> Any:
    """Compile replay.cpp, or load what was compiled of it before."""
    key = f"replay-{machine()}"
    found: Any = load_library(key)
    if found is None:
        found = compile_source(SOURCE.read_text(encoding="utf-8"))
        save_library(key, found._name)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    found.run.argtypes = [pointer, number, pointer]
    found.scan.argtypes = [pointer, pointer, number, pointer]
    found.run.restype = found.scan.restype = ctypes.c_char_p
    return found
