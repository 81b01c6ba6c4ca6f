"""Conclude a run after its rounds and its local reference: gains, model cards and tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from coterie.core import tree
from coterie.engine.fork_jobs import DoJobs
from coterie.evaluation import Benefit
from coterie.evaluation.fairness import spread
from coterie.evaluation.metrics import average
from coterie.evaluation.scoring import metrics_of
from coterie.experiment.result import Result
from coterie.experiment.setup import Setup
from coterie.experiment.take_home import adopt
from coterie.experiment.take_home.card import selected_by, write_cards
from coterie.profiling import timed
from coterie.storage import files
from coterie.storage.run_folder import FORMAT, RunFolder

FILES_OF_A_CLIENT = 4  # what is taken home, the local model, and two cards


@timed("finish")
def finish(
    result: Result, setup: Setup, out: Path | None, population: int | None = None, do: DoJobs | None = None
) -> None:
    """Complete the rows of `result` and, with `out`, write what the run folder still lacks; the tables come last.

    Args:
        result: the result of a run, with its local reference if there is one.
        setup: what was run.
        out: the run folder, or None to write nothing.
        population: how many clients trained together, if `setup` is that of one site only.
        do: runs the jobs that write the cards; by default, processes do.
    """
    beside = result.reference is not None or setup.config.take_home == "federated" or setup.config.method == "local"
    decided = benefit = None
    if adopt.wanted(setup.config) and result.validation is not None and beside:
        alone = None if result.reference is None else _outputs(result.reference)
        held_out = adopt.both(result.held_out, None if result.reference is None else result.reference.held_out)
        decided = adopt.decide(result.config, result.task, len(result.names), _outputs(result), alone, held_out)
    with files.together(FILES_OF_A_CLIENT * len(result.names) if out else 0):
        if result.reference is not None:
            if decided:
                _, benefit = result.benefits(decided.kept.test)
            add_benefit(result, out)
        if decided:
            take_home(result, decided, benefit, out)
        elif out:
            (out / adopt.FILE).unlink(missing_ok=True)  # of a run that was resumed with another choice
        if out:
            write_cards(result, setup, out, population=population, do=do)
    if out:
        write_tables(result, out)


def write_tables(result: Result, out: Path) -> None:
    """Write clients.csv and summary.json, which mark a run as finished: a folder without them can be resumed."""
    RunFolder(out).write_clients(result.clients)
    files.write_json(out / "summary.json", summary(result))


def add_benefit(result: Result, out: Path | None) -> None:
    """Add every client's gain over training alone, its interval and verdict to the rows, and write benefit.json."""
    found = result.benefit()
    for row, mine in zip(result.clients, found.clients, strict=True):
        row[f"local_test_{result.metric}"] = mine["local"]
        row |= {key: mine[key] for key in ("gain", "low", "high", "verdict")}
    if out:
        files.write_json(out / "benefit.json", found.to_json())


def take_home(result: Result, decided: adopt.Decisions, benefit: Benefit | None, out: Path | None) -> None:
    """Add what every client decided to take home to the rows, and write it."""
    before = None if result.reference is None else result.benefit()
    found = adopt.measured(decided, result.task, result.metric, result.names, benefit, before)
    result.take_home = found
    for i, row in enumerate(result.clients):
        row |= found.row(i)
    if out:
        reference = result.reference
        adopt.write(found, out, None if reference is None else lambda i: tree.pack(reference.view(i)))


def _outputs(result: Result) -> adopt.Outputs:
    assert result.validation is not None
    return adopt.Outputs(result.validation, result.predictions)


def summary(result: Result) -> dict[str, Any]:
    """Return the content of summary.json: the selected round and the last, with plain and weighted averages.

    In the plain average, clients count the same; in the weighted one, by their number of test examples.
    """
    names, how = metrics_of(result.task), result.config.average
    sizes = [row["test"] for row in result.clients]
    last = result.rounds[-1]["test"]
    content: dict[str, Any] = {
        "format": FORMAT,
        "method": result.config.method,
        "selected_round": result.selected,
        "selected_by": selected_by(result),
        "test": {name: result.mean(name) for name in names},
        "test_weighted": {name: result.mean(name, weighted=True) for name in names},
        "fairness": spread_of(result),
        "last_round": {
            "round": result.rounds[-1]["round"],
            "test": {name: average(last[name], how) for name in names},
            "test_weighted": {name: average(last[name], how, sizes) for name in names},
        },
    }
    if result.stopped:
        content["stopped"] = result.stopped.to_json()
    if result.budget:
        content["privacy"] = result.budget.to_json()
    if result.g_and_p:
        content["g_and_p"] = result.g_and_p
    if result.reference:
        content["local"] = {name: result.reference.mean(name) for name in names}
        content["local_weighted"] = {name: result.reference.mean(name, weighted=True) for name in names}
        content["clients_better_than_alone"] = int((result.gains() > 0).sum())
    return content


def spread_of(result: Result) -> dict[str, float]:
    """Return how evenly the metric that selected the round is spread over clients."""
    values = np.array([row[f"test_{result.metric}"] for row in result.clients])
    return spread(values, np.array([row["test"] for row in result.clients], dtype=float), result.metric)
