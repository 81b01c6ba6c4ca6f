"""Files are written so that a crash leaves the old one or the new one, never half of one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from coterie.core import tree
from coterie.core.errors import CheckpointError
from coterie.core.tree import Params
from coterie.profiling import timed

OWN_CHECKSUM = "checksum_of_this_file"  # a key of JSON files
SYNC_ONCE_FILES = 8  # so many files are worth one wait for the whole disk instead of one for each
_sync_each = ContextVar("_sync_each", default=True)


@contextlib.contextmanager
def together(number: int) -> Iterator[None]:
    """Let many files written in the block reach the disk together, at its end or at that of a block around it.

    A process that dies leaves whole files, as ever. A machine that dies before the end may leave empty ones, so the
    file that says that they are complete is to be written after the block.

    Args:
        number: how many files there will be; for few of them, each waits for the disk as usual.
    """
    if number < SYNC_ONCE_FILES or not hasattr(os, "sync") or not _sync_each.get():
        yield
        return
    before = _sync_each.set(False)
    try:
        yield
    finally:
        _sync_each.reset(before)
        os.sync()


@contextlib.contextmanager
def private() -> Iterator[None]:
    """Let only the owner read the files and folders that are made in the block, whatever the process's umask is."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@timed("write")
def write(path: Path, save: Callable[[Path], None]) -> None:
    """Write a file by `save`, which is given a temporary path that then takes the place of `path`.

    Raises:
        CheckpointError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
        save(temporary)
        if _sync_each.get():
            _sync(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True) if temporary.parent.is_dir() else None
        if isinstance(error, OSError):
            raise CheckpointError(f"'{path}' cannot be written: {error.strerror or error}") from error
        raise


def write_text(path: Path, text: str) -> None:
    write(path, lambda temporary: _save_text(temporary, text))


def write_json(path: Path, value: Any) -> None:
    write_text(path, to_json(value, indent=2) + "\n")


@timed("write")
def append(path: Path, lines: Iterable[bytes]) -> None:
    """Add lines to the end of a file: all of them, or none if that fails.

    Raises:
        CheckpointError: the file cannot be written.
    """
    left = memoryview(b"".join(lines))
    try:
        with path.open("ab", buffering=0) as file:
            begin = file.tell()
            try:
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except BaseException:
                file.truncate(begin)
                raise
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be written: {error.strerror}") from error


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON, in which NaN and infinity, which it does not have, are null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


@timed("write")
def write_tensors(path: Path, flat: Params, metadata: dict[str, str] | None = None) -> None:
    """Write tensors as safetensors; they may share memory, and be anywhere."""
    own = tree.separate(flat)

    def save(temporary: Path) -> None:
        try:
            save_file(own, temporary, metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error

    write(path, save)


def read_tensors(path: Path, expected_checksum: str | None = None) -> Params:
    """Read a file of `write_tensors`.

    Raises:
        CheckpointError: the file cannot be read, or its checksum is another than the expected one.
    """
    if expected_checksum is not None:
        check(path, expected_checksum)
    try:
        flat = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"'{path}' cannot be read: {error}") from error
    # In the file they stand at any multiple of four bytes, where products may round differently than in memory of
    # their own.
    return {name: value.clone() for name, value in flat.items()}


def write_checked(path: Path, flat: Params) -> None:
    """Write tensors with a checksum of their names, types, shapes and values."""
    write_tensors(path, flat, {"checksum": _content_checksum(flat)})


def read_checked(path: Path) -> Params:
    """Read a file of `write_checked`; raise `CheckpointError` if anything in it has changed since."""
    flat = read_tensors(path)
    with safe_open(path, "pt") as file:
        recorded = (file.metadata() or {}).get("checksum")
    if recorded != _content_checksum(flat):
        raise CheckpointError(f"'{path}' is corrupted: its checksum is not the one recorded when it was written")
    return flat


def write_checked_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON table with a checksum of its values."""
    write_json(path, value | {OWN_CHECKSUM: _value_checksum(value)})


def read_checked_json(path: Path) -> dict[str, Any]:
    """Read a file of `write_checked_json`; raise `CheckpointError` if anything in it has changed since.

    Files of earlier versions have no checksum; they are read as they are.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"'{path}' cannot be read: it is not a table")
    recorded = value.pop(OWN_CHECKSUM, None)
    if recorded is not None and recorded != _value_checksum(value):
        raise CheckpointError(f"'{path}' is corrupted: its checksum is not the one recorded when it was written")
    return value


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"'{path}' cannot be read: {error}") from error


def check(path: Path, expected_checksum: str) -> None:
    """Raise a `CheckpointError` if the file cannot be read or has another checksum."""
    try:
        if checksum(path) != expected_checksum:
            raise CheckpointError(f"'{path}' is corrupted: its checksum is not the one recorded when it was written")
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read: {error}") from error


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _content_checksum(flat: Params) -> str:
    digest = hashlib.blake2b(digest_size=32)
    for name, leaf in sorted(tree.separate(flat).items()):
        digest.update(f"{name} {leaf.dtype} {tuple(leaf.shape)} ".encode())
        dense = leaf.reshape(-1).clone(memory_format=torch.contiguous_format)  # a broadcast number has no stride
        digest.update(dense.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _value_checksum(value: dict[str, Any]) -> str:
    as_read = json.loads(to_json(value))  # with text for numbers that are keys
    return hashlib.blake2b(json.dumps(as_read, sort_keys=True).encode(), digest_size=32).hexdigest()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _sync(path: Path) -> None:
    """Wait until the disk has the file."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _save_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
