"""Writing so that a crash leaves the old file or the new one, never half of one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from coterie import tree
from coterie.errors import CheckpointError
from coterie.spans import timed
from coterie.tree import Params

MANY = 1000  # files that are worth one wait for the whole disk
_waits = ContextVar("_waits", default=True)  # for the disk, at every file


@contextlib.contextmanager
def together(number: int) -> Iterator[None]:
    """Of many files written inside, none waits for the disk, but all of them have reached it at the end.

    A process that dies leaves whole files, as ever. A machine that does, before the end, may leave empty ones: what
    says that they are there is to be written after it.
    """
    if number < MANY or not hasattr(os, "sync"):
        yield
        return
    before = _waits.set(False)
    try:
        yield
    finally:
        _waits.reset(before)
        os.sync()


@timed("write")
def write(path: Path, save: Callable[[Path], None]) -> None:
    """`save` writes a temporary neighbour, which then takes the place of `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
        save(temporary)
        if _waits.get():
            _wait_for(temporary)
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


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON has no NaN and no infinity: they become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


@timed("write")
def write_tensors(path: Path, flat: Params, metadata: dict[str, str] | None = None) -> None:
    own = tree.separate(flat)

    def save(temporary: Path) -> None:
        try:
            save_file(own, temporary, metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error

    write(path, save)


def read_tensors(path: Path, expected_checksum: str | None = None) -> Params:
    if expected_checksum is not None:
        check(path, expected_checksum)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"'{path}' cannot be read: {error}") from error


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"'{path}' cannot be read: {error}") from error


def check(path: Path, expected_checksum: str) -> None:
    try:
        if checksum(path) != expected_checksum:
            raise CheckpointError(f"'{path}' is corrupted: its checksum is not the one recorded when it was written")
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read: {error}") from error


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _wait_for(path: Path) -> None:
    """Until the disk has it."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _save_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
