"""Finds data sets: under --data-dir, then COTERIE_DATA, then the folder of `coterie data get`, then system packages."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from coterie.core.errors import DataError


@dataclass(frozen=True)
class DatasetFiles:
    """The files of a published data set, which is present in a folder that has one of `markers`."""

    name: str
    folders: tuple[str, ...]  # below a data folder; the first is the one that `coterie data get` fills
    markers: tuple[str, ...]  # patterns of file names
    advice: str  # how to get it, as the end of a sentence
    installed: tuple[str, ...] = ()  # where system packages put it

    def find(self, data_dir: str | Path | None = None) -> Path | None:
        """Return the folder with the files, or None."""
        below = [root / folder for root in data_folders(data_dir) for folder in self.folders]
        for place in [*below, *map(Path, self.installed)]:
            if any(next(place.glob(marker), None) for marker in self.markers):
                return place
        return None

    def require(self, data_dir: str | Path | None = None) -> Path:
        """Return the folder with the files; raise `DataError` with advice if there is none."""
        found = self.find(data_dir)
        if found is None:
            looked = ", ".join(f"'{root / self.folders[0]}'" for root in data_folders(data_dir))
            raise DataError(
                f"the data set {self.name} was not found: {self.advice}. Looked in {looked}; "
                "use --data-dir or COTERIE_DATA for another folder"
            )
        return found


def data_folders(data_dir: str | Path | None = None) -> list[Path]:
    """Return the data folders in the order in which they are searched."""
    given = [data_dir, os.environ.get("COTERIE_DATA")]
    return list(dict.fromkeys([*(Path(each).expanduser() for each in given if each), _user_folder()]))


def destination(data_dir: str | Path | None = None) -> Path:
    """Return the folder to which `coterie data get` writes."""
    return data_folders(data_dir)[0]


def cache_folder() -> Path:
    """Return the folder for decoded images; everything in it can be deleted."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coterie"


def _user_folder() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "coterie"
