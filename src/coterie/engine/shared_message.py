"""Tensors that one process hands to another through memory that both of them see.

There is no pickle: the memory holds a line of JSON that says where each tensor begins and what it is, then the tensors.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coterie.core import tree

_HEADER_LENGTH = struct.Struct("q")
_ALIGNMENT_BYTES = 64


class SharedMessage:
    """A piece of memory shared by forked processes. It holds one message at a time and grows as needed."""

    def __init__(self) -> None:
        self._file = os.memfd_create("coterie")
        self._map: mmap.mmap | None = None

    def write(self, about: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        """Replace the message.

        What occurs more than once is written once: rows that are all the same, or a tensor that is given twice.

        Args:
            about: what else the reader should know; it must fit into JSON.
            tensors: tensors on the CPU; they are copied.
        """
        shapes = [list(value.shape) for value in tensors]
        tensors = [value[0] if tree.is_broadcast(value) else value for value in tensors]
        offsets, end, distinct = list[int](), 0, dict[Any, tuple[int, Tensor]]()
        for value in tensors:
            key = (value.data_ptr(), value.dtype, value.shape, value.stride())
            if key not in distinct:
                distinct[key] = (end, value)
                end += _aligned(value.numel() * value.element_size())
            offsets.append(distinct[key][0])
        layout = [
            [str(value.dtype).removeprefix("torch."), list(value.shape), offset, shape]
            for value, offset, shape in zip(tensors, offsets, shapes, strict=True)
        ]
        header = json.dumps({**about, "tensors": layout}).encode()
        body = _aligned(_HEADER_LENGTH.size + len(header))
        memory = self._mapped(body + end)
        memory[: _HEADER_LENGTH.size] = _HEADER_LENGTH.pack(len(header))
        memory[_HEADER_LENGTH.size : _HEADER_LENGTH.size + len(header)] = header
        for offset, value in distinct.values():
            _tensor(memory, value.dtype, list(value.shape), body + offset).copy_(value)

    def read(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Return (`about`, the tensors) as they were written last.

        The tensors are views of the shared memory, so they hold until the next `write`.
        """
        memory = self._mapped(os.fstat(self._file).st_size)
        (length,) = _HEADER_LENGTH.unpack(memory[: _HEADER_LENGTH.size])
        about = json.loads(memory[_HEADER_LENGTH.size : _HEADER_LENGTH.size + length])
        body = _aligned(_HEADER_LENGTH.size + length)
        return about, [
            _tensor(memory, getattr(torch, kind), stored, body + offset).expand(shape)
            for kind, stored, offset, shape in about["tensors"]
        ]

    def close(self) -> None:
        """Give the memory up. Tensors that `read` returned keep what they show."""
        os.close(self._file)
        self._map = None

    def _mapped(self, size: int) -> mmap.mmap:
        existing = os.fstat(self._file).st_size
        if existing < size:
            os.ftruncate(self._file, existing := max(size, 2 * existing))
        if self._map is None or len(self._map) < existing:
            self._map = mmap.mmap(self._file, existing)
        return self._map


def _tensor(memory: mmap.mmap, dtype: torch.dtype, shape: list[int], offset: int) -> Tensor:
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
