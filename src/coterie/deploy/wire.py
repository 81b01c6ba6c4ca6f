"""The format of a message: a signed JSON header, and a body of tensors.

The body is a safetensors file, so none of it is ever executed. Two things keep it as small as the method's message:

- a leaf that equals an earlier one (often the models to train from and to evaluate) is referenced, not repeated;
- repeated rows along the first axis (unused room, such as absent classes) are sent once, with a count.

`decode` compares names, types, shapes and sizes in the body's table of contents with the expected tree before it
allocates any tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import torch
from pydantic import ConfigDict, Field, Json, TypeAdapter
from safetensors.torch import save
from torch import Tensor

from coterie.core import tree
from coterie.core.tree import Params, Tree
from coterie.deploy.refused import Refused
from coterie.deploy.schema import Strict, parse

T = TypeVar("T")
Size = Annotated[int, Field(ge=0, lt=2**48)]
Count = Annotated[int, Field(ge=1, lt=2**48)]
MIN_SAVED_BYTES = 128  # that a reference or a count must save
TABLE_LENGTH_BYTES = 8  # of the field with the length of the table of contents
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Envelope(NamedTuple):
    """A message as bytes; the signature is that of the header."""

    header: bytes
    body: bytes
    signature: bytes

    @property
    def nbytes(self) -> int:
        return sum(map(len, self))


def digest(data: bytes) -> str:
    """Return a BLAKE2b digest as hexadecimal text."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def encode(content: Tree) -> bytes:
    """Encode a tree of tensors as bytes; an empty tree has none."""
    flat = tree.separate(tree.pack(content))
    if not flat:
        return b""
    sent: Params = {}
    same: dict[str, str] = {}
    runs: dict[str, list[int]] = {}
    first: dict[Any, str] = {}
    for path, leaf in flat.items():
        if leaf.nbytes >= MIN_SAVED_BYTES:
            content_of = (leaf.dtype, leaf.shape, hashlib.blake2b(_bits(leaf).numpy().tobytes()).digest())
            if content_of in first:
                same[path] = first[content_of]
                continue
            first[content_of] = path
        sent[path], counts = _without_repeats(leaf)
        if counts:
            runs[path] = counts
    notes = {name: json.dumps(value, separators=(",", ":")) for name, value in {"same": same, "runs": runs}.items()}
    return save(sent, {name: text for name, text in notes.items() if text != "{}"} or None)


def decode(body: bytes, like: T) -> T:
    """Decode a body that must have the names, shapes and types of `like`; raise `Refused` if it has not."""
    expected = tree.pack(like)
    if not expected:
        if body:
            raise Refused("bad-tree", "the body should be empty")
        return like
    table, data = _contents(body)
    entries, same, runs = table.entries, table.notes.same, table.notes.runs
    if {*entries, *same} != expected.keys() or entries.keys() & same.keys():
        missing, extra = expected.keys() - {*entries, *same}, {*entries, *same} - expected.keys()
        raise Refused("bad-tree", f"{len(missing)} leaves are missing ({sorted(missing)[:5]}), {len(extra)} unexpected")
    for path, entry in entries.items():
        _check_entry(path, entry, expected[path], runs.get(path))
    for path, original in same.items():
        if original not in entries or _form(expected[original]) != _form(expected[path]):
            raise Refused("bad-tree", f"'{path}' cannot be the same as another leaf")
    if not runs.keys() <= entries.keys():
        raise Refused("bad-tree", "there are row counts for a leaf that does not exist")
    sent = {path: _read_leaf(path, entry, data) for path, entry in entries.items()}
    for path, counts in runs.items():
        sent[path] = sent[path].repeat_interleave(torch.tensor(counts), 0)
    return tree.rebuild({path: sent[same.get(path, path)] for path in expected}, like)


def limit(like: Tree) -> int:
    """Return the maximum number of bytes of a body of this form."""
    flat = tree.pack(like)
    return sum(leaf.nbytes + 8 * leaf.shape[0] if leaf.ndim else leaf.nbytes for leaf in flat.values()) + 1024 + sum(
        160 + 3 * len(path.encode()) for path in flat
    )  # fmt: skip


def as_leaf(data: bytes) -> Tensor:
    """Convert bytes to a leaf of a tree, such as mail that only its receiver can read."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def as_bytes(leaf: Tensor) -> bytes:
    """Convert a leaf back to bytes."""
    return leaf.numpy().tobytes()


def _bits(leaf: Tensor) -> Tensor:
    """View a leaf as bytes, so that -0.0 differs from 0.0 and NaN equals itself."""
    return leaf.reshape(-1).view(torch.uint8)


def _without_repeats(leaf: Tensor) -> tuple[Tensor, list[int]]:
    """Return (rows without immediate repetitions, their counts), or (leaf, []) if that saves little."""
    if leaf.ndim == 0 or leaf.nbytes < 2 * MIN_SAVED_BYTES or len(leaf) < 2:
        return leaf, []
    row_bytes = leaf.nbytes // len(leaf)
    bits = _bits(leaf).reshape(len(leaf), row_bytes)
    starts = torch.cat([torch.tensor([True]), (bits[1:] != bits[:-1]).any(1)]).nonzero().flatten()
    if (len(leaf) - len(starts)) * row_bytes < MIN_SAVED_BYTES + 4 * len(starts):
        return leaf, []
    counts = torch.diff(torch.cat([starts, torch.tensor([len(leaf)])]))
    return leaf[starts], [int(count) for count in counts]


class Entry(Strict):
    """Where a leaf is in the body."""

    dtype: Literal[tuple(DTYPES)]  # type: ignore[valid-type]
    shape: Annotated[tuple[Size, ...], Field(max_length=64)]
    data_offsets: tuple[Size, Size]


class Notes(Strict):
    """What is not repeated: leaves that equal others, and rows with their counts."""

    same: Json[dict[str, str]] = Field(default_factory=dict)
    runs: Json[dict[str, tuple[Count, ...]]] = Field(default_factory=dict)


class Table(Strict):
    """A table of contents as safetensors writes it."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Entry] = Field(init=False)
    notes: Notes = Field(default=Notes(), alias="__metadata__")

    @property
    def entries(self) -> dict[str, Entry]:
        return self.__pydantic_extra__


TABLE = TypeAdapter(Table)


def _contents(body: bytes) -> tuple[Table, memoryview]:
    """Return the table of contents and the data, of which the leaves must be all, without gap or overlap."""
    size = int.from_bytes(body[:TABLE_LENGTH_BYTES], "little") if len(body) >= TABLE_LENGTH_BYTES else -1
    if not 0 < size <= len(body) - TABLE_LENGTH_BYTES:
        raise Refused("bad-tree", f"a table of contents of {size} bytes in a body of {len(body)}")
    table = parse(TABLE, body[TABLE_LENGTH_BYTES : TABLE_LENGTH_BYTES + size], "bad-tree")
    data, end = memoryview(body)[TABLE_LENGTH_BYTES + size :], 0
    for start, stop in sorted(entry.data_offsets for entry in table.entries.values()):
        if start != end or stop < start:
            raise Refused("bad-tree", "the leaves in the table of contents overlap, or leave gaps")
        end = stop
    if end != len(data):
        raise Refused("bad-tree", "the table of contents does not fit the body's size")
    return table, data


def _check_entry(path: str, entry: Entry, expected: Tensor, counts: tuple[int, ...] | None) -> None:
    shape = list(expected.shape)
    if counts is not None:
        if not shape or sum(counts) != shape[0]:
            raise Refused("bad-tree", f"the row counts of '{path}' are wrong")
        shape[0] = len(counts)
    if list(entry.shape) != shape or DTYPES[entry.dtype] != expected.dtype:
        raise Refused("bad-tree", f"'{path}' should be {expected.dtype} {shape}, not {entry.dtype} {entry.shape[:8]}")
    size = expected.element_size() * math.prod(shape)
    start, end = entry.data_offsets
    if end - start != size:
        raise Refused("bad-tree", f"'{path}' has {end - start} bytes instead of {size}")


def _read_leaf(path: str, entry: Entry, data: memoryview) -> Tensor:
    """Return a leaf in memory of its own; its entry has been checked."""
    start, end = entry.data_offsets
    if start == end:
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    own = bytearray(data[start:end])
    if entry.dtype == "BOOL" and max(own) > 1:
        raise Refused("bad-tree", f"'{path}' has values that are neither true nor false")
    return torch.frombuffer(own, dtype=DTYPES[entry.dtype]).reshape(entry.shape)


def _form(leaf: Tensor) -> tuple[Any, ...]:
    return leaf.dtype, leaf.shape
