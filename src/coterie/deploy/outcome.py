"""The end of a deployed run: the same files as a simulation leaves, as far as whoever writes them has what they say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coterie import tree
from coterie.evaluation import Predictions
from coterie.evaluation.benefit import sign_of
from coterie.evaluation.metrics import METRICS
from coterie.evaluation.metrics import mean as mean_of
from coterie.experiment import files, picture
from coterie.experiment.config import to_toml
from coterie.experiment.finish import finish, summary
from coterie.experiment.folder import RunFolder, safe_name
from coterie.experiment.result import Result
from coterie.experiment.run import Silent, _client_rows, write_models, write_report
from coterie.experiment.setup import Setup
from coterie.tree import Tree

Record = dict[str, Any]
NOTHING = Predictions(torch.zeros(0, 1), torch.zeros(0), torch.zeros(0, dtype=torch.int64))


class Taken(NamedTuple):
    """What only a site has: its model, and what that says of its test examples. As rows, one a client."""

    views: Tree
    predictions: Predictions


def conclude(
    setup: Setup,
    out: Path,
    records: list[Record],
    best: int,
    taken: Taken | None,
    reference: Result | None = None,
    population: int | None = None,
) -> Result:
    """A run folder without `taken` (the server's: gains without intervals, no models), or with it, whole.

    `population` is the size of the federation where `setup` is that of one site.
    """
    rows = _client_rows(setup, records, best)
    views, predictions = taken or Taken((), NOTHING)
    about = (setup.metric, reference, setup.task, setup.method)
    result = Result(setup.config, out, rows, records, best, *about, views, predictions, {})
    folder = RunFolder(out)
    if not (out / "config.toml").exists():
        folder.create(to_toml(setup.config.to_file()))
    if taken is None and reference is not None:
        for row, gain, other in zip(rows, result.gains(), reference.clients, strict=True):
            row[f"local_test_{result.metric}"] = other[f"test_{result.metric}"]
            row["gain"] = float(gain)
    folder.write_clients(rows)
    files.write_json(out / "summary.json", summary(result))
    if taken is not None:
        folder.rewrite_rounds(records)
        folder.write_predictions(predictions)
        write_models(folder, result, setup.federation, population or len(rows))
    return result


def complete(result: Result, setup: Setup, out: Path, population: int | None = None) -> None:
    """What follows a run and its reference: the benefit with its intervals, cards, facts for the report, the report."""
    picture.write_facts(result, setup.federation, out)
    finish(result, setup, out, population)
    if setup.config.report:
        write_report(out, [out], Silent())


def read_taken(result: Path, name: str, form: Tree) -> Taken:
    """A site's model and predictions, from its own run folder."""
    view = tree.rebuild(files.read_tensors(result / "clients" / safe_name(name) / "model.safetensors"), form)
    return Taken(tree.broadcast(view, 1), RunFolder(result).read_predictions())


def together(each: Sequence[Taken]) -> Taken:
    """All sites', where they are on one machine."""
    views = tree.map(lambda *leaf: torch.cat(leaf), each[0].views, *(other.views for other in each[1:]))
    outputs, y = (torch.cat([getattr(one.predictions, key) for one in each]) for key in ("outputs", "y"))
    owner = torch.cat([one.predictions.owner + i for i, one in enumerate(each)])
    return Taken(views, Predictions(outputs, y, owner))


def scores(setup: Setup, told: Sequence[Mapping[str, Mapping[str, float | None]] | None]) -> Record:
    """{part: {metric: one number a client}} from what each client told; NaN for those that told nothing."""
    found: Record = {}
    for part in ("validation", "test", "global_validation", "global_test"):
        if part.startswith("global_") and not any(each and part in each for each in told):
            continue
        found[part] = {
            name: [_number((each or {}).get(part, {}).get(name)) for each in told] for name in METRICS[setup.task.kind]
        }
    return found


def better(metric: str, new: Record, old: Record | None) -> bool:
    """Strictly better on validation, so that ties go to the earlier round."""
    if old is None:
        return True
    ours, theirs = (sign_of(metric) * mean_of(record["validation"][metric]) for record in (new, old))
    return ours > theirs or (math.isnan(theirs) and not math.isnan(ours))


def _number(value: float | None) -> float:
    return math.nan if value is None or value != value else float(value)
