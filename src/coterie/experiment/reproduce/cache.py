"""Results of runs, kept by what decides them (`identity.py`), so that no table runs anything twice.

Each result is one JSON file: every client's scores in every evaluated round, and the round that validation selected.
Tables, tests and most figures need no more, so the run's folder with its models is deleted once the result is written.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from coterie import __version__
from coterie.core.errors import CheckpointError
from coterie.experiment.config import Config
from coterie.experiment.reproduce.identity import FORMAT, Identity, Record, code_of, data_files, decisive
from coterie.experiment.reproduce.shipped import Shipped
from coterie.experiment.result import Result
from coterie.storage import files

KEPT_METRICS = ("accuracy", "balanced_accuracy", "rmse")
MOST_WEIGHTS = 60_000  # numbers of who learns from whom that a result keeps


class Cache:
    """Keep results under a folder: `results/KEY.json`, and `unfinished/KEY/` for runs that were stopped.

    Args:
        folder: the folder.
        shipped: a file of results that were measured before (`shipped.py`); they count as if they were in the folder.
    """

    def __init__(self, folder: Path, shipped: Path | None = None) -> None:
        self.folder = folder
        self.shipped = Shipped(shipped)

    def unfinished(self, key: str) -> Path:
        """Return the folder of a run that is not complete."""
        return self.folder / "unfinished" / key

    def has(self, wanted: Identity) -> bool:
        """Return whether a result is there, of the code as it is."""
        return self._file(wanted.key).exists() or self.shipped.code_of(wanted) == wanted.code

    def find(self, wanted: Identity, *, whole: bool = False) -> Record | None:
        """Return a result; of older code, marked as such, if there is no other.

        Args:
            wanted: which.
            whole: with all evaluated rounds, which shipped results do not have.

        Raises:
            CheckpointError: it is damaged.
        """
        if self._file(wanted.key).exists():
            return self.read(wanted.key)
        found = None if whole else self.shipped.find(wanted)
        return found if found is None else {**found, "older": found["code"] != wanted.code}

    def read(self, key: str) -> Record:
        """Read a result of the folder.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        found: Record = files.read_json(self._file(key))
        if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("key") != key:
            raise CheckpointError(f"'{self._file(key)}' is not the result it should be: delete it")
        return found

    def write(self, key: str, record: Record) -> None:
        """Write a result, whole or not at all."""
        self._file(key).parent.mkdir(parents=True, exist_ok=True)
        files.write_text(self._file(key), files.to_json({"format": FORMAT, "key": key, **record}) + "\n")

    def _file(self, key: str) -> Path:
        return self.folder / "results" / f"{key}.json"


def record_of(result: Result, config: Config, model_bytes: int) -> Record:
    """Return what is kept of a run.

    Args:
        result: the run.
        config: its configuration, as `settled` gives it.
        model_bytes: the size of a client's model.
    """
    evaluated = [row for row in result.rounds if "test" in row]
    return {
        "config": decisive(config),
        "data_files": data_files(config),
        "code": code_of(config.method),
        "coterie": __version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "seconds": round(sum(row["seconds"] for row in result.rounds), 2),
        "metric": result.metric,
        "clients": [{k: row[k] for k in ("client", "train", "validation", "test")} for row in result.clients],
        "selected": result.selected,
        "rounds": [_scores(row, result.metric) for row in evaluated],
        "model_bytes": model_bytes,
        "bytes": [sum(row[way] for row in result.rounds) for way in ("bytes_up", "bytes_down")],
        "collaboration": _collaboration(evaluated),
    }


def _scores(row: dict[str, Any], metric: str) -> Record:
    kept: Record = {}
    for part in ("test", "global_test"):
        if part in row:
            kept[part] = {m: [_short(v) for v in row[part][m]] for m in KEPT_METRICS if m in row[part]}
    validation = float(np.nanmean(row["validation"][metric])) if not _all_nan(row["validation"][metric]) else None
    return {"round": row["round"], **kept, "validation": validation}


def _collaboration(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return who learned from whom, by round: of all evaluated rounds, or of the last one if there are many clients."""
    found = {str(row["round"]): row["server"]["collaboration"] for row in rows if "collaboration" in row["server"]}
    if not found:
        return {}
    each = sum(len(line) for line in next(iter(found.values())))
    rounds = list(found) if each * len(found) <= MOST_WEIGHTS else list(found)[-1:]
    return {number: [[_short(v, 4) for v in line] for line in found[number]] for number in rounds}


def _short(value: Any, digits: int = 6) -> float | None:
    return None if value is None or value != value else round(float(value), digits)


def _all_nan(values: list[float]) -> bool:
    return all(value != value for value in values)
