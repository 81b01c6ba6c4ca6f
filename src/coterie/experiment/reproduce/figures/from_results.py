"""Figures that need no more than the results of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from coterie.evaluation.metrics import mean
from coterie.experiment.reproduce.cache import Cache
from coterie.experiment.reproduce.figures.panels import Drawing, Panel, drawing, heatmap, lines, strips
from coterie.experiment.reproduce.identity import Record
from coterie.experiment.reproduce.names import find_table
from coterie.experiment.reproduce.running import Request
from coterie.experiment.reproduce.scores import at_selected, series, sizes
from coterie.experiment.reproduce.tables import Size

ACCURACY, ROUND = "test accuracy (%)", "round"


def results(cache: Cache, size: Size, table: str) -> dict[str, dict[int, Record]]:
    """Return all results of a table that are there with all their rounds: label -> seed -> result."""
    found = find_table(table)
    request = Request(found, size if size in found.sizes() else "full")
    return {entry.label: request.records(entry, cache, whole=True) for entry in found.entries}


def rounds_of(record: Record) -> list[float]:
    """Return the numbers of the evaluated rounds."""
    return [float(row["round"]) for row in record["rounds"]]


def client_curves(cache: Cache, size: Size) -> Drawing | None:
    """FedMAP's figure 1: each client's balanced accuracy over rounds, with the first seed."""
    panels = []
    for table, words in (("fedmap-5", "feature skew"), ("fedmap-6", "quantity skew"), ("fedmap-1", "label skew")):
        record = results(cache, size, table)["FedMAP"].get(0)
        if record is None:
            return None
        values = 100 * series(record, "", "balanced_accuracy")
        clients = {f"client {i + 1}": (rounds_of(record), values[:, i].tolist()) for i in range(values.shape[1])}
        panels.append(lines(words, ROUND, "balanced accuracy (%)", clients))
    return drawing("FedMAP, figure 1: each client's accuracy over rounds", panels)


def client_strips(cache: Cache, size: Size) -> Drawing | None:
    """FedAMP's figure 2: the distribution of the clients' accuracies at the round that validation selected."""
    panels = []
    for table, words in (("fedamp-3-mnist", "MNIST"), ("fedamp-3-fmnist", "Fashion-MNIST")):
        found = {label: records[0] for label, records in results(cache, size, table).items() if 0 in records}
        if found:
            rows = {k: (100 * series(r, "", "accuracy")[at_selected(r)]).tolist() for k, r in found.items()}
            panels.append(strips(words, ACCURACY, rows))
    return drawing("FedAMP, figure 2: the clients' accuracies", panels) if panels else None


def attention(cache: Cache, size: Size) -> Drawing | None:
    """FedAMP's figure 3: the weights xi after the last round, without those on oneself."""
    panels = []
    for table, words in (("fedamp-3-mnist", "MNIST"), ("fedamp-3-fmnist", "Fashion-MNIST")):
        for label in ("FedAMP", "HeurFedAMP"):
            record = results(cache, size, table)[label].get(0)
            if record is not None and record["collaboration"]:
                xi = np.array(list(record["collaboration"].values())[-1], dtype=float)
                np.fill_diagonal(xi, 0.0)
                panels.append(heatmap(f"{label}, {words}", "client", "client", xi.tolist()))
    return drawing("FedAMP, figure 3: who learns from whom", panels, 2) if panels else None


def weights_over_rounds(
    cache: Cache, size: Size, table: str, label: str, seeds: Sequence[int], title: str
) -> Drawing | None:
    """Draw each client's weights on all others over rounds."""
    panels: list[Panel] = []
    for seed in seeds:
        record = results(cache, size, table)[label].get(seed)
        if record is not None and record["collaboration"]:
            words = "" if len(seeds) == 1 else f"seed {seed}, "
            panels += weight_panels(record["collaboration"], words)
    return drawing(title, panels, 4) if panels else None


def weight_panels(collaboration: Mapping[str, Sequence[Sequence[float]]], words: str = "") -> list[Panel]:
    """Return a panel a client: its weight on everybody, over rounds."""
    rounds = [float(number) for number in collaboration]
    values = np.array(list(collaboration.values()), dtype=float)  # [rounds, clients, clients]
    panels = []
    for i in range(values.shape[1]):
        curves = {f"on {j}": (rounds, values[:, i, j].tolist()) for j in range(values.shape[2])}
        panels.append(lines(f"{words}client {i}", ROUND, "weight", curves, legend=i == 0))
    return panels


def hyper_curves(cache: Cache, size: Size) -> Drawing | None:
    """FedeRiCo's figure 6: accuracy over rounds, averaged over seeds."""
    panels = []
    for table in ("federico-6a", "federico-6b", "federico-6c"):
        found = {label: list(records.values()) for label, records in results(cache, size, table).items() if records}
        if len(found) > 2:  # more than local training and the paper's choice, which are those of table 1, too
            curves = {label.removeprefix("FedeRiCo, "): _mean_curve(records) for label, records in found.items()}
            panels.append(lines(find_table(table).title.split(": ")[1].split(",")[0], ROUND, ACCURACY, curves))
    return drawing("FedeRiCo, figure 6: accuracy over rounds", panels) if panels else None


def _mean_curve(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    each = [[100 * mean(row, sizes(record)) for row in series(record, "", "accuracy")] for record in records]
    return rounds_of(records[0]), np.mean(each, axis=0).tolist()


def weights_by_beta(cache: Cache, size: Size) -> Drawing | None:
    """FedeRiCo's figure 7: the first client's weights over rounds, for each beta."""
    panels = []
    for label, records in results(cache, size, "federico-6c").items():
        record = records.get(0)
        if record is not None and record["collaboration"]:
            first = weight_panels(record["collaboration"])[0]
            panels.append({**first, "title": label.removeprefix("FedeRiCo, ")})
    return drawing("FedeRiCo, figure 7: client 0's weights by beta", panels, 4) if len(panels) > 1 else None
