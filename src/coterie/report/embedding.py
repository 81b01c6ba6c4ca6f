"""Draws the clients' features in two dimensions by t-SNE, as in pFedVMP's Figure 2, and keeps the result."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import CheckpointError
from coterie.report.block import Picture
from coterie.report.figure import Figure
from coterie.report.read import RunData
from coterie.report.style import figure, series_colour, short_label
from coterie.report.tsne import tsne
from coterie.storage import files

MIN_EXAMPLES = 10
MAX_LEGEND_ENTRIES = 12


@dataclass(frozen=True)
class Embedding:
    """Test examples in two dimensions."""

    at: NDArray[np.float32]  # [examples, 2]
    label: NDArray[np.int64] | None  # None for a regression
    client: NDArray[np.int64]


def embedding(run: RunData) -> Embedding | None:
    """Return the embedding of a run's features, or None if it kept none."""
    path, cache = run.path / "features.safetensors", run.path / "embedding.json"
    if not path.exists():
        return None
    tensors = files.read_tensors(path)
    features, client = tensors["features"].numpy(), tensors["client"].numpy()
    label = tensors["label"].numpy() if "label" in tensors else None
    if len(features) < MIN_EXAMPLES or len(client) != len(features) or not np.isfinite(features).all():
        return None
    checksum = files.checksum(path)
    if cache.exists():
        kept = files.read_json(cache)
        if isinstance(kept, dict) and kept.get("of") == checksum and len(kept.get("at", [])) == len(features):
            return Embedding(np.array(kept["at"], dtype=np.float32), label, client)
    at = tsne(features)
    with contextlib.suppress(CheckpointError):  # a report can also be made from a read-only run folder
        files.write_json(cache, {"format": 1, "of": checksum, "at": [[round(float(v), 2) for v in p] for p in at]})
    return Embedding(at, label, client)


def pictures(run: RunData) -> list[Picture]:
    """Return the scatter plots by class and by client; empty without features."""
    found = embedding(run)
    if found is None:
        return []
    classes = (run.data or {}).get("classes") or []
    by_client = _scatter(found, found.client, [short_label(name) for name in run.names])
    made = [Picture("features-by-client", "Features, by client", _CAPTION.format("client"), by_client, half=True)]
    if found.label is not None:
        number = int(found.label.max()) + 1
        names = [short_label(classes[k]) if k < len(classes) else str(k) for k in range(number)]
        by_class = _scatter(found, found.label, names)
        made.insert(
            0, Picture("features-by-class", "Features, by class", _CAPTION.format("class"), by_class, half=True)
        )
    return made


_CAPTION = (
    "Features of test examples before the last layer of each client's own model, in two dimensions by t-SNE, "
    "coloured by {}."
)


def _scatter(found: Embedding, group: NDArray[np.int64], names: list[str]) -> Figure:
    members = [k for k in range(len(names)) if (group == k).any()]
    legend = len(members) <= MAX_LEGEND_ENTRIES
    made = figure(height=420, showlegend=legend)
    # Without a legend one trace is enough, and drawn in a fraction of the time of hundreds.
    for mine in [group == k for k in members] if legend else [np.isin(group, members)]:
        kinds = group[mine]
        made.add(
            "scatter",
            x=found.at[mine, 0],
            y=found.at[mine, 1],
            mode="markers",
            name=names[kinds[0]] if legend else "",
            text=[names[k] for k in kinds],
            marker={
                "color": series_colour(kinds[0]) if legend else [series_colour(k) for k in kinds],
                "size": 5,
                "opacity": 0.8,
                "line": {"width": 0},
            },
            hovertemplate="%{text}<extra></extra>",
        )
    made.update_xaxes(showticklabels=False, showgrid=False, ticks="")
    made.update_yaxes(showticklabels=False, showgrid=False, ticks="")
    return made
