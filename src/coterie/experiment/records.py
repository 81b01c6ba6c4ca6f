"""What is recorded of each round, which round is the best, and what a run's table says of each client."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from coterie.data import Federation
from coterie.evaluation.benefit import sign_of
from coterie.evaluation.metrics import average
from coterie.evaluation.scoring import metrics_of
from coterie.experiment.setup import Setup
from coterie.experiment.simulation import Round


def round_record(number: int, outcome: Round, federation: Federation) -> dict[str, Any]:
    """Return the record of a round without its scores and its time."""
    return {
        "round": number,
        "participants": [federation.names[i] for i in outcome.participants],
        "info": {name: value.tolist() for name, value in outcome.info.items()},
        "server": {name: value.tolist() for name, value in outcome.server_info.items()},
        "bytes_up": outcome.bytes_up,
        "bytes_down": outcome.bytes_down,
    }


def with_all_metrics(record: dict[str, Any], setup: Setup) -> dict[str, Any]:
    """Fill in NaN for metrics that an earlier version, with which the run began, did not measure."""
    unknown = dict.fromkeys(metrics_of(setup.task), [math.nan] * len(setup.federation.names))
    parts = ("validation", "test", "global_validation", "global_test")
    return record | {part: unknown | record[part] for part in parts if part in record}


def table_rows(setup: Setup, records: list[dict[str, Any]], best: int) -> list[dict[str, Any]]:
    """Return the rows of clients.csv: each client's metrics in round `best`, and its test metrics in the last one."""
    chosen = record_of(records, best)
    rows = []
    for i, (name, split) in enumerate(setup.federation.clients.items()):
        row: dict[str, Any] = {"client": name, "train": len(split.train), "validation": len(split.validation)}
        row |= {"test": len(split.test), "round": best}
        for part in ("validation", "test"):
            row |= {f"{part}_{metric}": chosen[part][metric][i] for metric in metrics_of(setup.task)}
        row |= {f"last_test_{metric}": records[-1]["test"][metric][i] for metric in metrics_of(setup.task)}
        rows.append(row)
    return rows


def record_of(records: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """Return the record of the round with this number."""
    return next(record for record in records if record["round"] == number)


def better(new: float, old: float) -> bool:
    """Return whether `new` is strictly better, so that ties go to the earlier round."""
    return new > old or (math.isnan(old) and not math.isnan(new))


def score_of(metric: str, how: str | None, record: Mapping[str, Any]) -> float:
    """Return the number that rounds are selected by, of which higher is better; `how` clients are averaged.

    Where the metric is defined for no client, as an AUROC is if all validation parts have one class, it is the loss.
    """
    by = record["validation"]
    found = sign_of(metric) * average(by[metric], how)
    return -average(by["loss"], how) if math.isnan(found) and "loss" in by else found
