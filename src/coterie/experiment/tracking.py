"""Watching a run from outside: every round's scalars, each client's included, to TensorBoard or MLflow.

Off unless asked for (`track = "tensorboard,mlflow"`); the packages come with extras of the same names. TensorBoard's
files are in the run folder; MLflow writes to MLFLOW_TRACKING_URI or, without it, to mlflow.db beside the run folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from coterie.errors import ConfigError, CoterieWarning
from coterie.experiment import files
from coterie.spans import timed

TRACKERS = {"tensorboard": "tensorboard", "mlflow": "mlflow"}  # name -> package
BATCH = 1000  # scalars that MLflow takes at once


class Tracker(Protocol):
    def log(self, step: int, scalars: dict[str, float]) -> None: ...
    def close(self) -> None: ...


def parse(text: str | None) -> tuple[str, ...]:
    """The trackers named in 'tensorboard,mlflow'; raises `ValueError` in words."""
    names = tuple(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"there is no tracker '{name}'; there are {', '.join(TRACKERS)}")
    return names


def check(text: str | None, out: Path | None) -> None:
    """Raises `ConfigError` if a tracker cannot work here, before anything trains."""
    problems = [
        f"track = '{name}' needs the package {package}: pip install 'coterie[{name}]'"
        for name, package in TRACKERS.items()
        if name in parse(text) and importlib.util.find_spec(package) is None
    ]
    if parse(text) and out is None:
        problems.append("track needs a run folder: name one with out=...")
    if problems:
        raise ConfigError(problems)


class Tracking:
    """All trackers of a run. One that fails is told of and left; the run goes on."""

    def __init__(self, text: str | None, out: Path | None, settings: dict[str, Any], clients: Sequence[str], done: int):
        self._clients = clients
        self._trackers: list[Tracker] = []
        for name in parse(text) if out is not None else ():
            assert out is not None
            with _told(name):
                self._trackers.append(_tensorboard(out, done) if name == "tensorboard" else MLflow(out, settings))

    @timed("write")
    def round(self, record: dict[str, Any]) -> None:
        if not self._trackers:
            return
        values = dict(scalars(record, self._clients))
        for tracker in list(self._trackers):
            with _told(type(tracker).__name__) as trouble:
                tracker.log(record["round"], values)
            if trouble:
                self._trackers.remove(tracker)

    def close(self) -> None:
        for tracker in self._trackers:
            with _told(type(tracker).__name__):
                tracker.close()


def scalars(record: dict[str, Any], clients: Sequence[str]) -> Iterator[tuple[str, float]]:
    """'test/accuracy/mean', 'test/accuracy/client-1', ...: what a round's record holds, one number each."""
    yield from ((key, float(record[key])) for key in ("bytes_up", "bytes_down", "seconds") if key in record)
    for part, by in record.items():
        if part in ("validation", "test", "global_validation", "global_test"):
            groups = {f"{part}/{metric}": (values, clients) for metric, values in by.items()}
        elif part == "info":
            groups = {f"train/{name}": (values, record["participants"]) for name, values in by.items()}
        else:
            continue
        for name, (values, owners) in groups.items():
            known = [
                (owner, float(value))
                for owner, value in zip(owners, values, strict=True)
                if isinstance(value, int | float) and math.isfinite(value)
            ]
            if known:
                yield f"{name}/mean", sum(value for _, value in known) / len(known)
            yield from ((f"{name}/{owner}", value) for owner, value in known)


class TensorBoard:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _tensorboard(out: Path, done: int) -> TensorBoard:
    from torch.utils.tensorboard import SummaryWriter

    # Rounds that were not checkpointed are run again: their old points go.
    return TensorBoard(SummaryWriter(str(out / "tensorboard"), purge_step=done + 1 if done else None))


class MLflow:
    """One MLflow run a run folder, whose id is kept in it; a resumed run goes on with it."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        from mlflow.tracking import MlflowClient

        place = out.parent if out.name == "reference" else out
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(place.parent / 'mlflow.db').resolve()}"
        self._client = MlflowClient(tracking_uri=uri)
        kept = out / "mlflow.json"
        if kept.exists():
            self._id = str(files.read_json(kept)["run_id"])
            self._client.update_run(self._id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name("coterie")
        experiment = found.experiment_id if found else self._client.create_experiment("coterie")
        label = f"{place.name}/reference" if place != out else out.name
        self._id = str(self._client.create_run(experiment, run_name=label).info.run_id)
        for key, value in _flat(settings):
            self._client.log_param(self._id, key, str(value)[:500])
        files.write_json(kept, {"run_id": self._id, "uri": uri})

    def log(self, step: int, scalars: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_allowed(name), value, now, step) for name, value in scalars.items()]
        for start in range(0, len(metrics), BATCH):
            self._client.log_batch(self._id, metrics=metrics[start : start + BATCH])

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _allowed(name: str) -> str:
    """MLflow's metric names have letters, digits, '_', '-', '.', ' ', ':' and '/' only."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-. :/") else "_" for c in name)


@contextlib.contextmanager
def _told(name: str) -> Iterator[list[Exception]]:
    """A tracker's failure becomes a warning, and stands in the list: no run is lost because a server is."""
    trouble: list[Exception] = []
    try:
        yield trouble
    except Exception as error:
        trouble.append(error)
        warnings.warn(f"{name} failed and is left out from here on: {error}", CoterieWarning, stacklevel=3)


def _flat(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{name}", each) for name, each in value.items())
        else:
            yield key, value
