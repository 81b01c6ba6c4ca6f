"""The settings of a run on sites' own files: which go together, and what they mean for `coterie.data.silos`."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.data.silos import Silos, sha256
from coterie.data.tables import MISSING
from coterie.errors import CheckpointError
from coterie.experiment import files

DATA = "silos"  # what a run on sites' own files has for the name of its data set
ENDINGS = (".csv", ".tsv", ".parquet", ".pq", ".data", ".txt")
OPTIONS = ("target", "schema", "columns", "missing", "site_column", "group", "drop", "regression")

# Small sites: short rounds, so that sites hear of each other before they overfit.
DEFAULTS: dict[str, Any] = {
    "model": "tabular",
    "rounds": 30,
    "local_epochs": 2,
    "batch_size": 32,
    "optimizer": {"name": "adam", "lr": 0.001},
}


def find_files(paths: Sequence[str]) -> list[str]:
    """The files meant by paths, globs and folders, absolute, so that the run can be gone on with from anywhere."""
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
    """Settings that do not go together, in words."""
    if not given.get("silos"):
        return [f"{key} is for data files: name them with silos" for key in OPTIONS if given.get(key) is not None]
    problems = []
    if given.get("data", DATA) != DATA:
        problems.append("give data or silos, not both")
    if given.get("target") is None and given.get("schema") is None:
        problems.append('silos needs a target, the column to predict: target = "name" (or a schema, which has it)')
    for key in ("target", "columns", "missing", "regression"):
        if given.get("schema") is not None and given.get(key) is not None:
            problems.append(f"give {key} or schema, not both: the schema says it")
    if given.get("site_column") is not None and isinstance(given["silos"], list) and len(given["silos"]) > 1:
        problems.append(f"site_column is for one file with all sites, but silos names {len(given['silos'])}")
    named = [given.get("target"), given.get("group"), given.get("site_column"), *(given.get("drop") or [])]
    twice = sorted({name for name in named if name is not None and named.count(name) > 1})
    problems += [f"'{name}' is given twice among target, group, site_column and drop" for name in twice]
    return problems


def options(config: Any) -> Silos:
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
    )


def record_files(run: Path, hashes: Mapping[str, str]) -> None:
    if hashes:
        files.write_json(run / "files.json", {"sha256": dict(hashes)})


def check_files(run: Path) -> None:
    """A run goes on with the files it began with, or not at all."""
    if not (run / "files.json").exists():
        return
    for file, recorded in files.read_json(run / "files.json")["sha256"].items():
        if not Path(file).is_file():
            raise CheckpointError(f"'{file}', which this run reads, is gone: put it back, or begin a new run")
        if sha256(file) != recorded:
            raise CheckpointError(
                f"'{file}' has changed since this run began: put the old file back, or begin a new run with the new one"
            )
