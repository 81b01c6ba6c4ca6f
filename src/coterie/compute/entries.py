"""Entries on disk about compiled code: small JSON files in `programs/` of the cache folder (`coterie.compute.cache`).

What they lead to is run. So an entry has its own checksum and those of the libraries that it names, which are in the
same folder. It is written whole or not at all, and may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from coterie.compute.cache import cache_folder

VERSION = 1  # of the format


def entry_path(key: str) -> Path:
    """Return where the entry with this key is, or would be."""
    return cache_folder() / "programs" / f"{key}.json"


def write_entry(key: str, about: dict[str, Any]) -> None:
    """Write an entry, in the place of the one that may be there.

    Raises:
        OSError: it cannot be written.
    """
    path, entry = entry_path(key), {"version": VERSION, "key": key, **about}
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps({"entry": entry, "sha256": _checksum_of_entry(entry)}))
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_entry(key: str) -> dict[str, Any]:
    """Return the entry with this key.

    Raises:
        OSError: there is none.
        ValueError, KeyError, TypeError: it is damaged, or of another version.
    """
    whole = json.loads(entry_path(key).read_text(encoding="utf-8"))
    entry: dict[str, Any] = whole["entry"]
    if whole["sha256"] != _checksum_of_entry(entry) or entry["version"] != VERSION or entry["key"] != key:
        raise ValueError("a damaged entry, or one of another version")
    return entry


def library_entry(path: str) -> dict[str, str]:
    """Describe a library in the cache folder.

    Raises:
        ValueError: it is elsewhere, where it may be changed or gone later.
    """
    where = Path(path).resolve().relative_to(cache_folder().resolve())
    return {"file": where.as_posix(), "sha256": _checksum(cache_folder() / where)}


def open_library(about: dict[str, str]) -> ctypes.CDLL:
    """Open the library that `library_entry` described.

    Raises:
        OSError: it is gone, or is no library.
        ValueError: it has changed.
    """
    path = (cache_folder() / about["file"]).resolve()
    path.relative_to(cache_folder().resolve())  # or ValueError
    if _checksum(path) != about["sha256"]:
        raise ValueError(f"{path} has changed")
    return ctypes.CDLL(str(path))


def save_library(key: str, path: str) -> None:
    """Remember where a compiled library is; where that is not possible, nothing happens."""
    with contextlib.suppress(OSError, ValueError):
        write_entry(key, {"library": library_entry(path)})


def load_library(key: str) -> ctypes.CDLL | None:
    """Return the library that was remembered under `key`, or None."""
    try:
        return open_library(read_entry(key)["library"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _checksum_of_entry(entry: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()
