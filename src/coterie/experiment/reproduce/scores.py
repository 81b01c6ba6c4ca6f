"""Scores of a table's rows, from kept results: by the paper's protocol, and at the round that validation selects."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.fairness import spread
from coterie.evaluation.metrics import mean
from coterie.evaluation.significance import signed_rank
from coterie.experiment.reproduce.identity import Record
from coterie.experiment.reproduce.tables import Entry, Protocol, Table

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """Hold what was measured for a row of a table, in percent.

    Attributes:
        label: the row.
        seeds: which seeds are there.
        protocol: by the paper's protocol, for each seed.
        selected: at the round that validation selects, for each seed.
        clients: the latter of each client, on average over the seeds; by the paper's protocol if it prints clients.
        rounds: which round validation selected, for each seed.
        seconds: the time of all rounds of all seeds, together.
        megabytes: what was sent in both directions in a round, on average.
        models: the same in models' sizes, for each client; None where that was not noted.
        older: how many of the seeds were run with older code of the method.
    """

    label: str
    seeds: list[int]
    protocol: list[float]
    selected: list[float]
    clients: list[float]
    rounds: list[int]
    seconds: float
    megabytes: float
    models: float | None = None
    older: int = 0


def series(record: Record, which: str, metric: str) -> Array:
    """Return every client's test metric in the evaluated rounds [rounds, clients]; NaN where it has none."""
    rows = [row[f"{which}test"][metric] for row in record["rounds"]]
    return np.array([[math.nan if value is None else value for value in row] for row in rows], dtype=float)


def sizes(record: Record) -> Array:
    """Return the clients' numbers of test examples."""
    return np.array([row["test"] for row in record["clients"]], dtype=float)


def one_number(protocol: Protocol, values: Array, weights: Array) -> float:
    """Return the average of the clients' values that a paper prints, in percent."""
    if protocol.over == "variation":
        return 100 * spread(values, weights, protocol.metric)["cv"]
    return 100 * mean(values, weights if protocol.over == "examples" else None)


def at_protocol(record: Record, which: str, protocol: Protocol) -> int:
    """Return the place, among the evaluated rounds, of the one that the paper's protocol takes.

    A coefficient of variation is that of the round with the best accuracy over all examples.
    """
    values, weights = series(record, which, protocol.metric), sizes(record)
    if protocol.at == "last":
        return len(values) - 1
    by = weights if protocol.over != "clients" else None
    return int(np.nanargmax([mean(row, by) for row in values]))


def at_selected(record: Record) -> int:
    """Return the place, among the evaluated rounds, of the one that validation selected."""
    return next(k for k, row in enumerate(record["rounds"]) if row["round"] == record["selected"])


def client_values(record: Record, entry: Entry, protocol: Protocol, *, selected: bool) -> Array:
    """Return the clients' values at the round that validation selected, or at that of the paper's protocol."""
    which = _which(record, entry)
    at = at_selected(record) if selected else at_protocol(record, which, protocol)
    found: Array = series(record, which, protocol.metric)[at]
    return found


def _which(record: Record, entry: Entry) -> str:
    return entry.which if not entry.which or f"{entry.which}test" in record["rounds"][0] else ""


def row_of(entry: Entry, protocol: Protocol, records: Mapping[int, Record]) -> Row:
    """Return the row of an entry from its results, by seed.

    At the round that validation selects, all rows of a table are scored alike, whatever the paper does.
    """
    numbers: dict[bool, list[float]] = {True: [], False: []}
    per_client = []
    for record in records.values():
        for selected in (True, False):
            by = replace(protocol, metric=entry.metric) if entry.metric and not selected else protocol
            values = client_values(record, entry, by, selected=selected)
            numbers[selected].append(round(one_number(by, values, sizes(record)), 4))
            if selected != bool(entry.clients):
                per_client.append(values)
    alike = len({len(each) for each in per_client}) == 1
    means = [100 * mean(column) for column in np.array(per_client).T] if alike else []
    sent = [sum(record["bytes"]) / int(record["rounds"][-1]["round"]) for record in records.values()]
    models = [
        each / (record["model_bytes"] * len(record["clients"]))
        for each, record in zip(sent, records.values(), strict=True)
        if record.get("model_bytes")
    ]
    return Row(
        entry.label,
        list(records),
        numbers[False],
        numbers[True],
        [round(value, 3) for value in means],
        [int(record["selected"]) for record in records.values()],
        round(sum(record["seconds"] for record in records.values()), 1),
        round(float(np.mean(sent)) / 1e6, 4),
        round(float(np.mean(models)), 3) if models else None,
        sum(record.get("older", False) for record in records.values()),
    )


@dataclass(frozen=True)
class Pair:
    """Compare two rows over clients, at the rounds that validation selects; positive: the first is better.

    Attributes:
        first: the label of a row.
        second: that of another.
        gain: of the first over the second in points, on average over clients and seeds.
        sd: of that gain over seeds; NaN for one seed.
        clients: how many differ.
        p: of Wilcoxon's signed-rank test, two-sided, corrected by Holm over all pairs of the table.
    """

    first: str
    second: str
    gain: float
    sd: float
    clients: int
    p: float


def pairs_of(table: Table, records: Mapping[str, Mapping[int, Record]]) -> list[Pair]:
    """Compare every two rows whose models are not the same, over the clients and seeds that both have.

    If every seed draws another federation, a client of one seed is another one than that of the next, and all count.
    Otherwise a client's differences are averaged over seeds first.
    """
    found = []
    rows = _distinct(table.entries, records)
    metric = Protocol("", table.protocol.metric)
    for k, first in enumerate(rows):
        for second in rows[k + 1 :]:
            shared = [seed for seed in records[first.label] if seed in records[second.label]]
            if not shared:
                continue
            differences = [
                client_values(records[first.label][seed], first, metric, selected=True)
                - client_values(records[second.label][seed], second, metric, selected=True)
                for seed in shared
            ]
            by_seed = [100 * mean(each) for each in differences]
            each_client = np.array([mean(column) for column in np.array(differences).T]) if not table.redrawn else None
            pooled = np.concatenate(differences) if each_client is None else each_client
            test = signed_rank(pooled)
            sd = float(np.std(by_seed, ddof=1)) if len(by_seed) > 1 else math.nan
            found.append(Pair(first.label, second.label, float(np.mean(by_seed)), sd, test["n"], test["p"]))
    return [
        Pair(**{**asdict(pair), "gain": round(pair.gain, 3), "sd": round(pair.sd, 3), "p": float(f"{p:.3g}")})
        for pair, p in zip(found, holm([pair.p for pair in found]), strict=True)
    ]


def _distinct(entries: Sequence[Entry], records: Mapping[str, Mapping[int, Record]]) -> list[Entry]:
    """Leave out rows without results, and those that score the same models as a row before them."""
    kept: dict[Any, Entry] = {}
    for entry in entries:
        if records.get(entry.label):
            same = tuple(record["key"] for record in records[entry.label].values())
            kept.setdefault((same, entry.which), entry)
    return list(kept.values())


def holm(p: Sequence[float]) -> list[float]:
    """Correct p-values for their number (Holm 1979): the k-th smallest of m by m - k + 1, never below one before it."""
    order = np.argsort(p, kind="stable")
    corrected, least = [0.0] * len(p), 0.0
    for k, at in enumerate(order):
        least = max(least, min(1.0, (len(p) - k) * p[at]))
        corrected[at] = least
    return corrected
