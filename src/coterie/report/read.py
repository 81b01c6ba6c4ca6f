"""Reads a run folder into plain values. Files that not every run has are optional."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import CheckpointError, CoterieError
from coterie.core.toml import read_toml
from coterie.evaluation.benefit import with_current_verdicts
from coterie.evaluation.metrics import AVERAGES, average
from coterie.report.style import sign
from coterie.storage import files
from coterie.storage.run_folder import FORMAT, from_csv_text

Array = NDArray[np.float64]
VERSIONED = (
    *("environment.json", "summary.json", "data.json", "benefit.json", "embedding.json"),
    *("take_home.json", "references.json"),
)


@dataclass(frozen=True)
class RunData:
    """The content of a run folder."""

    path: Path
    config: dict[str, Any]
    clients: list[dict[str, Any]]  # one row per client, at the selected round
    rounds: list[dict[str, Any]]
    summary: dict[str, Any]
    metric: str
    benefit: dict[str, Any] | None = None  # gains with intervals
    data: dict[str, Any] | None = None  # what each client has
    engine: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    reference: RunData | None = None  # training alone
    take_home: dict[str, Any] | None = None  # what the clients chose to keep
    references: dict[str, Any] | None = None  # what usual models of tables reach

    @property
    def method(self) -> str:
        return str(self.config["method"])

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", 0))

    @property
    def names(self) -> list[str]:
        return [str(row["client"]) for row in self.clients]

    @property
    def selected(self) -> int:
        return int(self.summary["selected_round"])

    @property
    def last_round(self) -> int:
        """The last round that was trained: of a run that stopped early, not the last planned one."""
        return int(self.rounds[-1]["round"] if self.rounds else self.config.get("rounds", self.selected))

    @property
    def average_name(self) -> str:
        """What the average over clients is called."""
        return AVERAGES[self.config.get("average") or "mean"]

    def average(self, values: Array) -> float:
        """Average over clients, as the run's configuration says."""
        return average(values, self.config.get("average"))

    @cached_property
    def evaluated(self) -> list[dict[str, Any]]:
        return [record for record in self.rounds if "test" in record]

    @property
    def metrics(self) -> list[str]:
        """All metrics; the one that selected the round comes first."""
        return sorted(self.evaluated[0]["test"], key=lambda name: name != self.metric) if self.evaluated else []

    def column(self, name: str) -> Array:
        """Return a column of clients.csv, [clients]; NaN where it is unknown."""
        return numbers([row.get(name) for row in self.clients])

    def scores(self, metric: str | None = None) -> Array:
        """Return the test metric at the selected round, [clients]."""
        return self.column(f"test_{metric or self.metric}")

    def alone(self, metric: str | None = None) -> Array | None:
        """Return the test metric of training alone at its own selected round, [clients]; None if it is unknown."""
        if self.method == "local":
            return self.scores(metric)
        if self.reference is not None:
            return self.reference.scores(metric or self.metric)
        found = self.column(f"local_test_{metric or self.metric}")
        return None if np.isnan(found).all() else found

    def gains(self, metric: str | None = None) -> Array | None:
        """Return how much better each client is than alone, [clients]; positive is better for every metric."""
        alone = self.alone(metric)
        if alone is None or self.method == "local":
            return None
        return sign(metric or self.metric) * (self.scores(metric) - alone)

    def curve(self, metric: str, split: str = "test") -> tuple[Array, Array]:
        """Return (rounds [T], values [T, clients]) of a metric."""
        found = [record for record in self.evaluated if metric in record.get(split, {})]
        at = np.array([record["round"] for record in found], dtype=float)
        values = [numbers(record[split][metric]) for record in found]
        return at, np.array(values).reshape(len(found), len(self.clients))


def numbers(values: Any) -> Array:
    """Convert to floats, with NaN for values that are missing or not finite."""
    found = np.array([_float(value) for value in values], dtype=float)
    found[~np.isfinite(found)] = np.nan
    return found


def mean(values: Array) -> float:
    """Average the values that are not NaN."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else math.nan


def find(paths: list[Path]) -> list[Path]:
    """Return all run folders of `paths`; a folder of `coterie compare` stands for all its runs."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise CoterieError(f"there is no folder '{path}'")
        inside = [path] if (path / "config.toml").exists() else sorted(p.parent for p in path.glob("*/config.toml"))
        if not inside:
            raise CoterieError(
                f"'{path}' is not a run folder (it has no config.toml) and does not contain any: "
                "give a folder that 'coterie run' or 'coterie compare' has written"
            )
        found += [each for each in inside if each not in found]
    return found


def read(path: Path) -> RunData:
    """Read a run folder; raise `CheckpointError` if it is incomplete, damaged, or of a newer version."""
    for name in VERSIONED:
        _check_version(path / name)
    config = read_toml(path / "config.toml")
    if not (path / "summary.json").exists() or not (path / "clients.csv").exists():
        raise CheckpointError(f"'{path}' is not complete: 'coterie resume {path}' continues it")
    try:
        summary = files.read_json(path / "summary.json")
        metric = str(summary["selected_by"]).split()[-1]
        run = RunData(
            path,
            config,
            _read_clients(path / "clients.csv"),
            _read_rounds(path / "rounds.jsonl"),
            summary,
            metric,
            _benefit(path / "benefit.json"),
            _optional(path / "data.json"),
            _optional(path / "engine.json") or {},
            _optional(path / "environment.json") or {},
            _reference(path),
            _optional(path / "take_home.json"),
            _optional(path / "references.json"),
        )
        _check(run)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(f"'{path}' cannot be read as a run: {type(error).__name__} {error}") from error
    return run


def _reference(path: Path) -> RunData | None:
    beside = path / "reference"
    return read(beside) if (beside / "summary.json").exists() else None


def _check(run: RunData) -> None:
    if not run.clients:
        raise ValueError("clients.csv has no client")
    for record in run.evaluated:
        for by in (record[part] for part in ("validation", "test") if part in record):
            if any(len(values) != len(run.clients) for values in by.values()):
                raise ValueError(f"round {record['round']} does not have one value per client")
    if run.benefit is not None and [row["client"] for row in run.benefit["clients"]] != run.names:
        raise ValueError("benefit.json and clients.csv do not have the same clients")


def _check_version(path: Path) -> None:
    about = _optional(path)
    version = about.get("format", 0) if about else 0
    if isinstance(version, int) and version > FORMAT:
        raise CheckpointError(
            f"'{path}' was written by a newer version of Coterie (format {version}; this one reads up to {FORMAT}): "
            "update Coterie to read it"
        )


def _optional(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    found = files.read_json(path)
    if not isinstance(found, dict):
        raise CheckpointError(f"'{path}' cannot be read: it contains a {type(found).__name__}, not a table")
    return found


def _benefit(path: Path) -> dict[str, Any] | None:
    found = _optional(path)
    return None if found is None else with_current_verdicts(found)


def _read_clients(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        return [
            {key: from_csv_text(text) if key == "client" else _float(text) for key, text in row.items()}
            for row in csv.DictReader(file)
        ]


def _read_rounds(path: Path) -> list[dict[str, Any]]:
    records = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise CheckpointError(f"'{path}' line {number} cannot be read: {error}") from error
    return records


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
