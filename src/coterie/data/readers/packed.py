"""Limits how much a packed file may hold, so that a small one cannot fill the memory."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.errors import DataError

ALWAYS_ALLOWED_BYTES = 2**28
MAX_RATIO = 100  # of unpacked to packed, beyond that; deflate can reach 1,032, data with anything in them do not


def check_unpacked(path: Path, packed: int, unpacked: int) -> None:
    """Raise `DataError` if so many packed bytes claim to hold too many."""
    if unpacked > max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * packed):
        raise DataError(
            f"'{path}' would unpack {packed:,} bytes to {unpacked:,}, more than {MAX_RATIO} times as many: it is "
            "damaged or made to fill the memory; if it is neither, save it uncompressed (numpy.savez)"
        )


def load_arrays(path: Path) -> dict[str, np.ndarray] | np.ndarray:
    """Load a .npy or .npz file without pickled objects, of arrays that are as large in the file as they claim.

    Raises:
        DataError: The file is missing, damaged, or unpacks to too much.
    """
    try:
        if not zipfile.is_zipfile(path):
            with path.open("rb") as file:
                _check_header(path, file, path.stat().st_size)
            loaded: np.ndarray = np.load(path, allow_pickle=False)
            return loaded
        with zipfile.ZipFile(path) as whole:
            members = whole.infolist()
            check_unpacked(path, path.stat().st_size, sum(member.file_size for member in members))
            for member in members:
                with whole.open(member) as inside:
                    _check_header(path, inside, member.file_size)
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except FileNotFoundError:
        raise DataError(f"there is no file '{path}'") from None
    except DataError:
        raise
    except Exception as error:  # a damaged file can raise anything
        raise DataError(f"'{path}' cannot be read as {path.suffix}: {error}. Get or save it again") from error


def _check_header(path: Path, file: Any, size: int) -> None:
    """Check that an array's header does not claim more bytes than there are."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if math.prod(shape) * dtype.itemsize > size:
        raise DataError(f"'{path}' claims an array of {shape} {dtype}, but has {size} bytes for it")
