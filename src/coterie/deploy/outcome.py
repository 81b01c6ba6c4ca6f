"""The end of a deployed run: the same files as a simulation leaves, on the server and at each site."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie import tree
from coterie.evaluation import BETTER
from coterie.evaluation.metrics import METRICS
from coterie.experiment import files
from coterie.experiment.config import to_toml
from coterie.experiment.folder import RunFolder
from coterie.experiment.result import Result
from coterie.experiment.run import _client_rows, _write_models, summary
from coterie.experiment.setup import Setup
from coterie.tree import Tree

Record = dict[str, Any]


def conclude(
    setup: Setup,
    out: Path,
    records: list[Record],
    best: int,
    views: Tree | None,
    reference: Result | None = None,
    population: tuple[int, int] | None = None,
) -> Result:
    """`views` are rows, or None where the models stay at the sites; `population` is (size, audience) of the federation
    where `setup` is that of one site."""
    rows = _client_rows(setup, records, best)
    result = Result(
        setup.config, out, rows, records, best, setup.metric, reference, setup.task, setup.method, views or ()
    )
    if reference is not None:
        for row, gain, other in zip(rows, result.gains(), reference.clients, strict=True):
            row[f"local_test_{result.metric}"] = other[f"test_{result.metric}"]
            row["gain"] = float(gain)
    folder = RunFolder(out)
    if not (out / "config.toml").exists():
        folder.create(to_toml(setup.config.to_file()))
    if views is not None:
        folder.rewrite_rounds(records)
        _write_models(folder, result, setup.federation)
        for path in (out / "clients").glob("*/model.json") if population else ():
            files.write_json(path, {**files.read_json(path), "population": list(population or ())})
    folder.write_clients(rows)
    files.write_json(out / "summary.json", summary(result))
    return result


def scores(setup: Setup, told: Sequence[Mapping[str, Mapping[str, float]] | None]) -> Record:
    """{part: {metric: one number a client}} from what each client told; NaN for those that told nothing."""
    found: Record = {}
    for part in ("validation", "test", "global_validation", "global_test"):
        if part.startswith("global_") and not any(each and part in each for each in told):
            continue
        names = METRICS[setup.task.kind]
        found[part] = {name: [float((each or {}).get(part, {}).get(name, math.nan)) for each in told] for name in names}
    return found


def mean(record: Record, metric: str) -> float:
    """Over the clients that told; NaN if none did."""
    values = [value for value in record["validation"][metric] if not math.isnan(value)]
    return sum(values) / len(values) if values else math.nan


def better(metric: str, new: Record, old: Record | None) -> bool:
    """Strictly better on validation, so that ties go to the earlier round."""
    if old is None:
        return True
    ours, theirs = mean(new, metric), mean(old, metric)
    if math.isnan(theirs):
        return not math.isnan(ours)
    return (BETTER[metric] is max and ours > theirs) or (BETTER[metric] is min and ours < theirs)


def rows_of(view: Tree) -> Tree:
    return tree.broadcast(view, 1)
