"""Makes the page of a federation: who has which classes and how many examples, and how much their labels differ."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.distance import Distances, class_counts, client_examples, label_distances
from coterie.data.federation import Federation
from coterie.report.block import Note, Page, Picture, Section, Table
from coterie.report.distribution import bubbles, sizes
from coterie.report.figure import Figure
from coterie.report.style import OURS, figure

MAX_BINS = 40
TOTAL_VARIATION = "total variation: 0 means the same shares of all classes, 1 means no common class"


def page(title: str, subtitle: str, federation: Federation) -> Page:
    """Make the page."""
    names = list(federation.names)
    totals = np.array([len(own) for own in client_examples(federation)])
    blocks: list[Picture | Table | Note] = []
    tiles = [
        ("clients", f"{len(names):,}", federation.name),
        ("examples", f"{totals.sum():,}", _range_per_client(totals)),
    ]
    verdict = f"{len(names):,} clients have {totals.sum():,} examples, {_range_per_client(totals)}."
    if federation.num_classes is not None:
        counts = class_counts(federation)
        found = label_distances(counts)
        classes = list(federation.classes) or [str(k) for k in range(federation.num_classes)]
        tiles += [_classes_tile(counts), *_distance_tiles(found)]
        caption = "The area of a bubble is the number of examples. Rows are classes, columns are clients."
        blocks.append(Picture("labels", "Who has which classes", caption, bubbles(counts, names, classes)))
    blocks += [
        Picture(
            "sizes", "Examples of each client", "For training, validation and testing together.", sizes(totals, names)
        ),
        Picture(
            "size-histogram",
            "Distribution of sizes",
            "Number of clients by their number of examples.",
            histogram(totals),
        ),
        _table(federation, names),
    ]
    return Page(title, subtitle, verdict, tiles, [Section("The clients' data", blocks)])


def histogram(totals: NDArray[np.int64]) -> Figure:
    """Draw a histogram of the clients' numbers of examples."""
    bins = min(len(np.histogram_bin_edges(totals, "auto")) - 1, MAX_BINS) if len(np.unique(totals)) > 1 else 1
    number, edges = np.histogram(totals, bins)
    texts = [f"{low:,.0f} to {high:,.0f}" for low, high in itertools.pairwise(edges)]
    made = figure(height=260, showlegend=False, bargap=0.04)
    made.add(
        "bar",
        x=(edges[:-1] + edges[1:]) / 2,
        y=number,
        width=np.diff(edges),
        marker={"color": OURS, "line": {"width": 0}},
        text=texts,
        textposition="none",
        hovertemplate="%{text} examples: %{y} clients<extra></extra>",
    )
    made.update_xaxes(title={"text": "examples"}, showgrid=False)
    made.update_yaxes(title={"text": "clients"}, rangemode="tozero", tickformat=",d")
    return made


def summary(federation: Federation) -> list[str]:
    """Summarise the federation in a few lines."""
    totals = np.array([len(own) for own in client_examples(federation)])
    lines = [f"examples: {totals.sum():,}, {_range_per_client(totals)}"]
    if federation.num_classes is None:
        return [*lines, f"{federation.target.words}: there are no classes, so label distances do not apply"]
    counts = class_counts(federation)
    found = label_distances(counts)
    have = (counts > 0).sum(1)
    lines.append(f"classes: {federation.num_classes}, {_range_per_client(have)}")
    if len(found.between):
        lines.append(f"label distance between two clients: {_mean_min_max(found.between)}")
    lines.append(f"label distance between a client and all together: {_mean_min_max(found.from_all)}")
    return [*lines, f"({TOTAL_VARIATION})"]


def _classes_tile(counts: NDArray[np.int64]) -> tuple[str, str, str]:
    have = (counts > 0).sum(1)
    return "classes per client", f"{np.mean(have):.3g}", f"of {counts.shape[1]}, {have.min()} to {have.max()}"


def _distance_tiles(found: Distances) -> list[tuple[str, str, str]]:
    tiles = [("label distance to all clients", f"{found.from_all.mean():.2f}", _range(found.from_all))]
    if len(found.between):
        tiles.insert(0, ("label distance between two clients", f"{found.between.mean():.2f}", _range(found.between)))
    return tiles


def _table(federation: Federation, names: list[str]) -> Table:
    columns = ["client", "train", "validation", "test"]
    splits = [[len(split[part]) for part in ("train", "validation", "test")] for split in federation.clients.values()]
    rows: list[list[Any]] = [[name, *((f"{n:,}", n) for n in row)] for name, row in zip(names, splits, strict=True)]
    caption = ""
    if federation.num_classes is not None:
        counts = class_counts(federation)
        columns += ["classes", "distance to all"]
        caption = f"Distance: {TOTAL_VARIATION}."
        extra = zip(rows, (counts > 0).sum(1), label_distances(counts).from_all, strict=True)
        rows = [[*row, (str(have), int(have)), (f"{far:.2f}", float(far))] for row, have, far in extra]
    return Table("clients", "Every client", columns, rows, caption)


def _range_per_client(numbers: NDArray[np.int64]) -> str:
    if numbers.min() == numbers.max():
        return f"{numbers.min():,} per client"
    return f"{numbers.min():,} to {numbers.max():,} per client (median {np.median(numbers):,.0f})"


def _mean_min_max(values: NDArray[np.float64]) -> str:
    return f"mean {values.mean():.3f}, minimum {values.min():.3f}, maximum {values.max():.3f}"


def _range(values: NDArray[np.float64]) -> str:
    return f"{values.min():.2f} to {values.max():.2f}"
