"""Check the settings of a run on sites' own files, and turn them into options of `coterie.data.tables.silos`."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.core.errors import CheckpointError
from coterie.data.tables.reading import MISSING
from coterie.data.tables.silos import Silos, sha256
from coterie.storage import files

DATA = "silos"  # the name of the data set in a run on sites' own files
ENDINGS = (".csv", ".tsv", ".parquet", ".pq", ".data", ".txt")
OPTIONS = ("target", "schema", "columns", "missing", "site_column", "group", "drop", "regression", "levels")

# Sites are small, so rounds are short: sites learn from each other before they overfit.
DEFAULTS: dict[str, Any] = {
    "model": "tabular",
    "rounds": 30,
    "local_epochs": 2,
    "batch_size": 32,
    "optimizer": {"name": "adam", "lr": 0.001},
}


def find_files(paths: Sequence[str]) -> list[str]:
    """Return the files that paths, globs and folders stand for.

    The paths are absolute, so that the run can be resumed from any folder.

    Raises:
        ValueError: there is no such file, or a folder has none.
    """
    found: list[str] = []
    for path in paths:
        if Path(path).is_dir():
            inside = sorted(str(each) for each in Path(path).iterdir() if each.suffix.lower() in ENDINGS)
            if not inside:
                raise ValueError(f"folder '{path}' has no file that ends in {', '.join(ENDINGS)}")
            found += inside
        elif Path(path).is_file():
            found.append(path)
        elif not (matching := sorted(glob.glob(path))):
            raise ValueError(f"there is no file '{path}'")
        else:
            found += matching
    return list(dict.fromkeys(str(Path(path).resolve()) for path in found))


def misuses(given: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each problem with settings that exclude or need each other."""
    if not given.get("silos"):
        return [f"{key} is for data files: name them with silos" for key in OPTIONS if given.get(key) is not None]
    problems = []
    if given.get("data", DATA) != DATA:
        problems.append("give data or silos, not both")
    if given.get("target") is None and given.get("schema") is None:
        problems.append('silos needs a target, the column to predict: target = "name" (or a schema, which has it)')
    for key in ("target", "columns", "missing", "regression", "levels", "task", "horizons"):
        if given.get("schema") is not None and given.get(key) is not None:
            problems.append(f"give {key} or schema, not both: the schema says it")
    if given.get("regression") is not None and given.get("task") is not None:
        problems.append("give task or regression, not both: regression is short for task = 'regression'")
    if given.get("levels") is not None and given.get("task") not in ("ordinal", "multitask"):
        problems.append("levels are for task = 'ordinal'")
    if given.get("horizons") is not None and given.get("task") not in ("survival", "multitask"):
        problems.append("horizons are for task = 'survival'")
    if given.get("site_column") is not None and isinstance(given["silos"], list) and len(given["silos"]) > 1:
        problems.append(f"site_column is for one file with all sites, but silos names {len(given['silos'])}")
    named = [given.get("target"), given.get("group"), given.get("site_column"), *(given.get("drop") or [])]
    twice = sorted({name for name in named if name is not None and named.count(name) > 1})
    problems += [f"'{name}' is given twice among target, group, site_column and drop" for name in twice]
    return problems


def options(config: Any) -> Silos:
    """Return the options for reading the files that a configuration names."""
    return Silos(
        tuple(config.silos),
        target=config.target,
        schema=config.schema,
        columns=tuple(config.columns or ()),
        missing=tuple(config.missing if config.missing is not None else MISSING),
        site_column=config.site_column,
        group=config.group,
        drop=tuple(config.drop or ()),
        regression=config.regression,
        task=config.task,
        horizons=tuple(config.horizons or ()),
        levels=tuple(config.levels or ()),
    )


def record_files(run: Path, hashes: Mapping[str, str]) -> None:
    """Write the hashes of the files that a run reads to files.json, if there are any."""
    if hashes:
        files.write_json(run / "files.json", {"sha256": dict(hashes)})


def check_files(run: Path) -> None:
    """Raise `CheckpointError` unless the files that a run began with are still the same."""
    if not (run / "files.json").exists():
        return
    for file, recorded in files.read_json(run / "files.json")["sha256"].items():
        if not Path(file).is_file():
            raise CheckpointError(f"'{file}', which this run reads, is gone: put it back, or begin a new run")
        if sha256(file) != recorded:
            raise CheckpointError(
                f"'{file}' has changed since this run began: put the old file back, or begin a new run with the new one"
            )
