"""Results of runs, kept by what decides them, so that no table runs anything twice.

The key of a result is a hash of the resolved configuration, of the files of the data set (names and sizes), and of the
code of the method with the parts it imports (without comments and docstrings). Each result is one JSON file: every
client's scores in every evaluated round, and the round that validation selected. Tables, tests and most figures need no
more, so the run's folder with its models is deleted once the result is written.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from coterie import __version__
from coterie.core.errors import CheckpointError
from coterie.data import SOURCES
from coterie.experiment.config import Config
from coterie.experiment.given import sort_settings
from coterie.experiment.resolve import resolve
from coterie.experiment.result import Result
from coterie.experiment.several.compare import SETTINGS_NOT_COMPARED
from coterie.methods.fields import AnyMethod, find_method, values_of
from coterie.methods.named import optimizer_of
from coterie.storage import files

FORMAT = 1
KEPT_METRICS = ("accuracy", "balanced_accuracy", "rmse")
SHARED_CODE = ("coterie.parts", "coterie.core.training", "coterie.core.optimizers")  # that a method's own is made of
MOST_WEIGHTS = 60_000  # numbers of who learns from whom that a result keeps
Record = dict[str, Any]


def settled(method: str, settings: Mapping[str, Any]) -> tuple[Config, AnyMethod]:
    """Return the configuration of a run with all defaults, without reading data.

    Raises:
        ConfigError: settings are wrong; it lists every problem.
    """
    values = sort_settings(method, {**settings, "reference": False, "report": False})
    config, built = resolve({**values, "method": method})
    resolved = {"hyper": values_of(built), "optimizer": optimizer_of(built) or config.optimizer}
    return config.model_copy(update=resolved), built


def decisive(config: Config) -> dict[str, Any]:
    """Return what of a configuration decides the result."""
    skipped = {*SETTINGS_NOT_COMPARED, "setting", "data_dir", "reference"}
    return {key: value for key, value in config.to_file().items() if key not in skipped}


def key_of(config: Config) -> str:
    """Return the name under which the result of a configuration is kept."""
    decides = [FORMAT, decisive(config), data_files(config), code_of(config.method)]
    return hashlib.blake2b(json.dumps(decides, sort_keys=True).encode(), digest_size=12).hexdigest()


def data_files(config: Config) -> list[tuple[str, int]]:
    """Return the names and sizes of the files that a data set is read from; none if it is generated."""
    source = SOURCES.get(config.data)
    folder = source.files.find(config.data_dir) if source is not None and source.files is not None else None
    if folder is None:
        return []
    return sorted((file.name, file.stat().st_size) for file in folder.iterdir() if file.is_file())


@functools.cache
def code_of(method: str) -> str:
    """Return a hash of a method's code and of the parts it imports; comments and docstrings do not count."""
    cls = find_method(method)[0]
    digest, seen, todo = hashlib.blake2b(digest_size=12), set[str](), [cls.__module__]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        tree = _without_docstrings(_parsed(name))
        todo += [each for each in _imported(tree) if each.startswith(SHARED_CODE)]
    for name in sorted(seen):
        digest.update(ast.unparse(_without_docstrings(_parsed(name))).encode())
    return digest.hexdigest()


def _parsed(module: str) -> ast.Module:
    file = sys.modules[module].__file__ if module in sys.modules else importlib.import_module(module).__file__
    assert file is not None
    return ast.parse(Path(file).read_text(encoding="utf-8"))


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of the library that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("coterie."):
            yield node.module
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if hasattr(importlib.import_module(node.module), "__path__") and importlib.util.find_spec(name):
                    yield name


class Cache:
    """Keep results under a folder: `results/KEY.json`, and `unfinished/KEY/` for runs that were stopped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def unfinished(self, key: str) -> Path:
        """Return the folder of a run that is not complete."""
        return self.folder / "unfinished" / key

    def has(self, key: str) -> bool:
        """Return whether a result is there."""
        return self._file(key).exists()

    def read(self, key: str) -> Record:
        """Read a result.

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


def record_of(result: Result, config: Config) -> Record:
    """Return what is kept of a run.

    Args:
        result: the run.
        config: its configuration, as `settled` gives it.
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
