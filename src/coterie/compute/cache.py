"""Where compiled steps are kept: a folder of the user's own, since what is found there is run."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class Folder(NamedTuple):
    path: Path
    why_temporary: str | None = None  # in words; None: it is kept for later runs


def cache_folder() -> Path:
    """Return the folder that compiled steps are kept in."""
    return folder().path


@functools.cache
def folder() -> Folder:
    """Make the user's cache folder; where that fails (a read-only or full home), make a temporary one and say why.

    The temporary one is removed when the process ends.
    """
    place = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    chosen = os.environ.get(VARIABLE)
    if chosen and not _is_default(chosen):
        return Folder(Path(chosen))
    try:
        path = Path(place).expanduser() / "coterie" / "torchinductor"
        if " " in str(path):
            raise OSError(None, "TorchInductor cannot compile in a folder whose path has a space")
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=path):
            return Folder(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        words = getattr(error, "strerror", None) or str(error)
        temporary = Path(tempfile.mkdtemp(prefix="coterie-"))
        atexit.register(_remove, temporary, os.getpid())
        return Folder(temporary, f"compiled steps are not kept for later runs, since {place} cannot be used ({words})")


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not a fork
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Name the folder to TorchInductor, which reads the environment, and take the name back at the end."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(cache_folder()) if not before or _is_default(before) else before
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


def _is_default(place: str) -> bool:
    """Tell whether it is the folder that PyTorch itself names, in the environment too, when it is imported.

    Nobody chose that folder, and others may write where it is.
    """
    return Path(place).parent == Path(tempfile.gettempdir()) and Path(place).name.startswith("torchinductor_")
