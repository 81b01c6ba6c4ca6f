"""Log every round's scalars, including each client's, to TensorBoard or MLflow.

This is off unless asked for (`track = "tensorboard,mlflow"`); the packages come with extras of the same names.
TensorBoard's files are in the run folder; MLflow writes to MLFLOW_TRACKING_URI or, without it, to mlflow.db beside the
run folder.
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

from coterie.core.errors import ConfigError, CoterieWarning
from coterie.profiling import timed
from coterie.storage import files

TRACKERS = {"tensorboard": "tensorboard", "mlflow": "mlflow"}  # name -> package
BATCH = 1000  # scalars that MLflow accepts at once


class Tracker(Protocol):
    """Log scalars somewhere."""

    def log(self, step: int, scalars: dict[str, float]) -> None: ...
    def close(self) -> None: ...


def parse(text: str | None) -> tuple[str, ...]:
    """Return the trackers named in text such as 'tensorboard,mlflow'; raise `ValueError` if one is unknown."""
    names = tuple(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"there is no tracker '{name}'; there are {', '.join(TRACKERS)}")
    return names


def check(text: str | None, out: Path | None) -> None:
    """Raise `ConfigError`, before anything trains, if a tracker is not installed or has no folder to write to."""
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
    """Hold all trackers of a run. If one fails, a warning says so and the run continues without it."""

    def __init__(self, text: str | None, out: Path | None, settings: dict[str, Any], clients: Sequence[str], done: int):
        self._clients = clients
        self._trackers: list[Tracker] = []
        for name in parse(text) if out is not None else ():
            assert out is not None
            with _warn_on_failure(name):
                self._trackers.append(_tensorboard(out, done) if name == "tensorboard" else MLflow(out, settings))

    @timed("write")
    def round(self, record: dict[str, Any]) -> None:
        """Log a round."""
        if not self._trackers:
            return
        values = dict(scalars(record, self._clients))
        for tracker in list(self._trackers):
            with _warn_on_failure(type(tracker).__name__) as trouble:
                tracker.log(record["round"], values)
            if trouble:
                self._trackers.remove(tracker)

    def close(self) -> None:
        """Close all trackers."""
        for tracker in self._trackers:
            with _warn_on_failure(type(tracker).__name__):
                tracker.close()


def scalars(record: dict[str, Any], clients: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yield the numbers in a round's record by name: 'test/accuracy/mean', 'test/accuracy/client-1', ..."""
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
    """Log to TensorBoard's files."""

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

    # Rounds after the last checkpoint are run again, so their old points are removed.
    return TensorBoard(SummaryWriter(str(out / "tensorboard"), purge_step=done + 1 if done else None))


class MLflow:
    """Log to one MLflow run per run folder. Its id is kept in the folder, so a resumed run continues it."""

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
    """Replace what MLflow does not allow in metric names: all but letters, digits, '_', '-', '.', ' ', ':', '/'."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-. :/") else "_" for c in name)


@contextlib.contextmanager
def _warn_on_failure(name: str) -> Iterator[list[Exception]]:
    """Turn a tracker's failure into a warning, and add it to the list: no run is lost because a server is down."""
    trouble: list[Exception] = []
    try:
        yield trouble
    except Exception as error:
        trouble.append(error)
        warnings.warn(f"{name} failed and is not used any more in this run: {error}", CoterieWarning, stacklevel=3)


def _flat(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield settings by name; those in a table are called TABLE.NAME."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{name}", each) for name, each in value.items())
        else:
            yield key, value
