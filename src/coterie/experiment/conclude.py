"""The end of a run, after its rounds and its local reference: what is made of them, in one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from coterie.engine.workers import Do
from coterie.evaluation.fairness import spread
from coterie.evaluation.metrics import METRICS, mean
from coterie.experiment import files
from coterie.experiment.card import write_cards
from coterie.experiment.folder import FORMAT, RunFolder
from coterie.experiment.result import Result
from coterie.experiment.setup import Setup
from coterie.spans import timed


@timed("finish")
def finish(result: Result, setup: Setup, out: Path | None, population: int | None = None, do: Do | None = None) -> None:
    """Complete the rows of `result` and, with `out`, write what the run folder still lacks; the summary comes last.

    `population` is the size of the federation where `setup` is that of one site. The cards are
    written by `do`, if it is given.
    """
    if result.reference is not None:
        add_benefit(result, out)
    if out:
        write_cards(result, setup, out, population=population, do=do)
        files.write_json(out / "summary.json", summary(result))


def add_benefit(result: Result, out: Path | None) -> None:
    """Every client's gain over training alone, with its interval and verdict: in the rows, and as benefit.json."""
    found = result.benefit()
    for row, mine in zip(result.clients, found.clients, strict=True):
        row[f"local_test_{result.metric}"] = mine["local"]
        row |= {key: mine[key] for key in ("gain", "low", "high", "verdict")}
    if out:
        RunFolder(out).write_clients(result.clients)
        files.write_json(out / "benefit.json", found.to_json())


def summary(result: Result) -> dict[str, Any]:
    """The selected round and the last; averages in which clients count alike, and by their test examples."""
    names = METRICS[result.task.kind]
    sizes = [row["test"] for row in result.clients]
    last = result.rounds[-1]["test"]
    told: dict[str, Any] = {
        "format": FORMAT,
        "method": result.config.method,
        "selected_round": result.selected,
        "selected_by": f"mean validation {result.metric}",
        "test": {name: result.mean(name) for name in names},
        "test_weighted": {name: result.mean(name, weighted=True) for name in names},
        "fairness": spread_of(result),
        "last_round": {
            "round": result.rounds[-1]["round"],
            "test": {name: mean(last[name]) for name in names},
            "test_weighted": {name: mean(last[name], sizes) for name in names},
        },
    }
    if result.g_and_p:
        told["g_and_p"] = result.g_and_p
    if result.reference:
        told["local"] = {name: result.reference.mean(name) for name in names}
        told["local_weighted"] = {name: result.reference.mean(name, weighted=True) for name in names}
        told["clients_better_than_alone"] = int((result.gains() > 0).sum())
    return told


def spread_of(result: Result) -> dict[str, float]:
    """The fairness of the metric that selected the round."""
    values = np.array([row[f"test_{result.metric}"] for row in result.clients])
    return spread(values, np.array([row["test"] for row in result.clients], dtype=float), result.metric)
