"""Where data sets lie: under --data-dir, then COTERIE_DATA, then what `coterie data get` fills, then where packages put
them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import DataError


@dataclass(frozen=True)
class Files:
    """The files of a published data set: it is present where a folder has one of `markers`."""

    name: str
    folders: tuple[str, ...]  # below a data folder, the one that is filled first
    markers: tuple[str, ...]  # patterns of file names
    advice: str  # how to get it, as the end of a sentence
    installed: tuple[str, ...] = ()  # where packages put it

    def find(self, data_dir: str | Path | None = None) -> Path | None:
        below = [root / folder for root in roots(data_dir) for folder in self.folders]
        for place in [*below, *map(Path, self.installed)]:
            if any(next(place.glob(marker), None) for marker in self.markers):
                return place
        return None

    def require(self, data_dir: str | Path | None = None) -> Path:
        found = self.find(data_dir)
        if found is None:
            looked = ", ".join(f"'{root / self.folders[0]}'" for root in roots(data_dir))
            raise DataError(
                f"the data set {self.name} is not here: {self.advice}. Looked in {looked}; "
                "--data-dir or COTERIE_DATA names another folder"
            )
        return found


def roots(data_dir: str | Path | None = None) -> list[Path]:
    """The data folders, in the order in which they are searched."""
    given = [data_dir, os.environ.get("COTERIE_DATA")]
    return list(dict.fromkeys([*(Path(each).expanduser() for each in given if each), _own()]))


def destination(data_dir: str | Path | None = None) -> Path:
    """Where `coterie data get` writes."""
    return roots(data_dir)[0]


def cache() -> Path:
    """Where decoded images are kept; everything there can be deleted."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coterie"


def _own() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "coterie"


def first_existing(folder: Path, names: Sequence[str]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)
