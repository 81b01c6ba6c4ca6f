"""Writes the files of a deployed run: the same as those of a simulation, as far as the writer has the data for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coterie.core import tree
from coterie.core.toml import to_toml
from coterie.core.tree import Tree
from coterie.deploy.schema import Metrics, Part
from coterie.evaluation import Predictions
from coterie.evaluation.scoring import metrics_of
from coterie.experiment import report_data, stopping
from coterie.experiment.conclude import finish
from coterie.experiment.execute import write_models
from coterie.experiment.progress import Silent
from coterie.experiment.records import table_rows
from coterie.experiment.result import Result
from coterie.experiment.run import write_report
from coterie.experiment.setup import Setup
from coterie.experiment.stopping import Stop
from coterie.experiment.take_home import adopt
from coterie.storage import files
from coterie.storage.run_folder import VALIDATION, RunFolder, safe_name

Record = dict[str, Any]
NO_PREDICTIONS = Predictions(torch.zeros(0, 1), torch.zeros(0), torch.zeros(0, dtype=torch.int64))


class SiteResults(NamedTuple):
    """What only a site has: its model and the predictions on its own examples; one row per client."""

    views: Tree
    predictions: Predictions
    validation: Predictions | None = None  # predictions on its validation examples


def conclude(
    setup: Setup,
    out: Path,
    records: list[Record],
    best: int,
    results: SiteResults | None,
    reference: Result | None = None,
    population: int | None = None,
    stopped: Stop | None = None,
) -> Result:
    """Write a run folder, but for its tables, and return its result.

    The tables, clients.csv and summary.json, mark a folder as finished. They come last, once: from `complete`, or from
    `write_tables` where nothing follows.

    Args:
        setup: The setup of the run; at a site, that of one client.
        out: The run folder.
        records: One record per round.
        best: The selected round.
        results: Models and predictions. Without them, as at the server, gains have no intervals, and no models are
            written.
        reference: The result of training alone.
        population: The size of the federation, if `setup` is that of one site.
        stopped: When and why the rounds ended early, if they did.
    """
    rows = table_rows(setup, records, best)
    views, predictions, validation = results or SiteResults((), NO_PREDICTIONS)
    about = (setup.metric, reference, setup.task, setup.method)
    result = Result(
        setup.config,
        out,
        rows,
        records,
        best,
        *about,
        views,
        predictions,
        {},
        validation=validation,
        budget=setup.budget,
        stopped=stopped,
    )
    folder = RunFolder(out)
    if not (out / "config.toml").exists():
        folder.create(to_toml(setup.config.to_file()))
    if stopped is not None:
        stopping.write(out, stopped)
    if results is None and reference is not None:
        for row, gain, other in zip(rows, result.gains(), reference.clients, strict=True):
            row[f"local_test_{result.metric}"] = other[f"test_{result.metric}"]
            row["gain"] = float(gain)
    if results is not None:
        folder.rewrite_rounds(records)
        folder.write_predictions(predictions)
        if validation is not None and adopt.wanted(setup.config):
            folder.write_predictions(validation, VALIDATION)
        write_models(folder, result, setup.federation, population or len(rows))
    return result


def complete(result: Result, setup: Setup, out: Path, population: int | None = None) -> None:
    """Write what follows a run and its reference: data for the report, gains, cards, tables, and the report."""
    report_data.write_federation(result, setup.federation, out)
    finish(result, setup, out, population)
    if setup.config.report:
        write_report(out, [out], Silent())


def read_site_results(result: Path, name: str, form: Tree) -> SiteResults:
    """Read a site's model and predictions from its own run folder."""
    view = tree.rebuild(files.read_tensors(result / "clients" / safe_name(name) / "model.safetensors"), form)
    folder, kept = RunFolder(result), (result / f"{VALIDATION}.safetensors").exists()
    validation = folder.read_predictions(VALIDATION) if kept else None
    return SiteResults(tree.broadcast(view, 1), folder.read_predictions(), validation)


def merge_site_results(each: Sequence[SiteResults]) -> SiteResults:
    """Merge the results of all sites, if they are on one machine."""
    views = tree.map(lambda *leaf: torch.cat(leaf), each[0].views, *(other.views for other in each[1:]))
    validation = [one.validation for one in each if one.validation is not None]
    both = _merged([one.predictions for one in each]), _merged(validation) if len(validation) == len(each) else None
    return SiteResults(views, *both)


def _merged(each: Sequence[Predictions]) -> Predictions:
    outputs, y = (torch.cat([getattr(one, key) for one in each]) for key in ("outputs", "y"))
    return Predictions(outputs, y, torch.cat([one.owner + i for i, one in enumerate(each)]))


def scores(setup: Setup, metrics: Sequence[Metrics | None]) -> Record:
    """Return {part: {metric: one number per client}} from each client's metrics; NaN for clients without any."""
    found: Record = {}
    parts: tuple[Part, ...] = ("validation", "test", "global_validation", "global_test")
    for part in parts:
        if part.startswith("global_") and not any(each and part in each for each in metrics):
            continue
        found[part] = {
            name: [_number((each or {}).get(part, {}).get(name)) for each in metrics] for name in metrics_of(setup.task)
        }
    return found


def _number(value: float | None) -> float:
    return math.nan if value is None or value != value else float(value)
