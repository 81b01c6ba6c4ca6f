"""Keeps recorded steps on disk, so that a later process neither traces a step nor starts TorchInductor.

An entry (`coterie.compute.entries`) is found by what the step is (`coterie.compute.step_key`). It holds the operations
of a `ReplayedStep`, the sizes of the memory that they use, and which functions of which libraries, made by
TorchInductor, its kernels are. Addresses are not kept: an operation has the number of its kernel.

An entry that is damaged, or that names what is not there, counts as none. Whether it does what the step does is for the
caller to find out (`coterie.compute.compiled`).
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np
import torch

from coterie.compute.entries import library_entry, open_library, read_entry, write_entry
from coterie.compute.replay import KERNEL, MAX_ARGUMENTS, OP_FIELDS, POOL_LENGTH, PRODUCT, READ, Kernel, ReplayedStep

MAX_BUFFER_BYTES = 1 << 36
KIND, ADDRESS, FIRST, NUMBER = range(4)  # fields of an operation


def save(key: str, step: ReplayedStep) -> None:
    """Keep a step for later processes; where that is not possible, nothing happens."""
    if step.has_constants:
        return
    with contextlib.suppress(OSError, ValueError, KeyError):  # KeyError: a kernel of nowhere
        write_entry(key, _spelled_out(step))


def load(key: str) -> ReplayedStep | None:
    """Return the step that was kept under `key`; None where there is none, or it cannot be used."""
    try:
        return _step(read_entry(key))
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RuntimeError):
        return None


def _spelled_out(step: ReplayedStep) -> dict[str, Any]:
    kernels = sorted(set(step.kernels.values()))
    files = sorted({kernel.file for kernel in kernels})
    ops = step.ops.copy()
    ops[:, ADDRESS] = [kernels.index(step.kernels[int(op[ADDRESS])]) if op[KIND] == KERNEL else 0 for op in step.ops]
    ops[ops[:, KIND] == READ, POOL_LENGTH] = 0  # which every scan sets
    places = list(dict.fromkeys(storage.data_ptr() for storage in step.buffers))
    sizes = {storage.data_ptr(): storage.nbytes() for storage in step.buffers}
    return {
        "fields": OP_FIELDS,
        "libraries": [library_entry(file) for file in files],
        "kernels": [[files.index(kernel.file), kernel.name] for kernel in kernels],
        "ops": ops.tolist(),
        "owner": step.owner.tolist(),
        "offset": step.offset.tolist(),
        "buffers": [places.index(storage.data_ptr()) for storage in step.buffers],
        "sizes": [sizes[place] for place in places],
        "inputs": step.num_inputs,
        "swaps": [[leaf, place] for leaf, place in step.swaps.items()],
    }


def _step(entry: dict[str, Any]) -> ReplayedStep:
    if entry["fields"] != OP_FIELDS:
        raise ValueError("operations of another form")
    libraries = [open_library(each) for each in entry["libraries"]]
    found = [(Kernel(str(libraries[at]._name), str(name)), libraries[at][name]) for at, name in entry["kernels"]]
    addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for _, function in found]
    ops, owner, offset = (np.array(entry[name], np.int64) for name in ("ops", "owner", "offset"))
    sizes, num_inputs = entry["sizes"], int(entry["inputs"])
    if not all(isinstance(size, int) and 0 <= size <= MAX_BUFFER_BYTES for size in sizes):
        raise ValueError("memory of no size")
    memory = [torch.empty(size, dtype=torch.uint8).untyped_storage() for size in sizes]
    buffers = [memory[at] for at in entry["buffers"]]
    swaps = {int(leaf): int(place) for leaf, place in entry["swaps"]}
    _check(ops, owner, offset, num_inputs, [each.nbytes() for each in buffers], len(addresses), swaps)
    is_kernel = ops[:, KIND] == KERNEL
    ops[is_kernel, ADDRESS] = [addresses[int(number)] for number in ops[is_kernel, ADDRESS]]
    kernels = {address: kernel for address, (kernel, _) in zip(addresses, found, strict=True)}
    return ReplayedStep(ops, owner, offset, buffers, num_inputs, swaps, kernels)


def _check(
    ops: Any, owner: Any, offset: Any, num_inputs: int, buffers: list[int], kernels: int, swaps: dict[int, int]
) -> None:
    """Raise `ValueError` if an operation names what is not there."""
    good = ops.ndim == 2 and ops.shape[1] == OP_FIELDS and owner.ndim == 1 and owner.shape == offset.shape
    if not good or not len(ops):
        raise ValueError("operations without operands")
    is_kernel = ops[:, KIND] == KERNEL
    first, number = ops[:, FIRST], ops[:, NUMBER]
    room = np.array([np.iinfo(np.int64).max] * num_inputs + buffers)  # how large inputs are, the key says
    good = bool(
        np.isin(ops[:, KIND], (KERNEL, PRODUCT, READ)).all()
        and ((ops[:, ADDRESS] >= 0) & (ops[:, ADDRESS] < np.where(is_kernel, kernels, 1))).all()
        and ((first >= 0) & (number > 0) & (number <= MAX_ARGUMENTS) & (first + number <= len(owner))).all()
        and ((owner >= 0) & (owner < num_inputs + len(buffers))).all()
    )
    if not good or not ((offset >= 0) & (offset <= room[owner])).all():
        raise ValueError("an operation on what is not there")
    if not all(0 <= leaf < num_inputs <= place < num_inputs + len(buffers) for leaf, place in swaps.items()):
        raise ValueError("a carry in no place")
