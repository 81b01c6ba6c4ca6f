"""The clients' features in two dimensions, by t-SNE: pFedVMP's Figure 2. Computed once, then kept in the run folder."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from coterie.errors import CheckpointError
from coterie.experiment import files
from coterie.report.block import Picture
from coterie.report.read import Run
from coterie.report.style import figure, plain, series

FEWEST = 10  # examples
LEGEND = 12  # entries


@dataclass(frozen=True)
class Embedding:
    at: NDArray[np.float32]  # [examples, 2]
    label: NDArray[np.int64] | None  # None: a regression
    client: NDArray[np.int64]


def embedding(run: Run) -> Embedding | None:
    """Of the run's features, if it has kept any."""
    path, cache = run.path / "features.safetensors", run.path / "embedding.json"
    if not path.exists():
        return None
    tensors = files.read_tensors(path)
    features, client = tensors["features"].numpy(), tensors["client"].numpy()
    label = tensors["label"].numpy() if "label" in tensors else None
    if len(features) < FEWEST or len(client) != len(features) or not np.isfinite(features).all():
        return None
    checksum = files.checksum(path)
    if cache.exists():
        kept = files.read_json(cache)
        if isinstance(kept, dict) and kept.get("of") == checksum and len(kept.get("at", [])) == len(features):
            return Embedding(np.array(kept["at"], dtype=np.float32), label, client)
    at = tsne(features)
    with contextlib.suppress(CheckpointError):  # a run folder that cannot be written to can still be looked at
        files.write_json(cache, {"format": 1, "of": checksum, "at": [[round(float(v), 2) for v in p] for p in at]})
    return Embedding(at, label, client)


def tsne(features: NDArray[np.float32]) -> NDArray[np.float32]:
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    spread = features.std(0)
    scaled = (features - features.mean(0)) / np.where(spread > 0, spread, 1)
    if scaled.shape[1] > 50:
        scaled = PCA(min(50, len(scaled)), random_state=0).fit_transform(scaled)
    perplexity = min(30.0, (len(scaled) - 1) / 3)
    init = "pca" if scaled.shape[1] > 1 else "random"
    found: NDArray[np.float32] = TSNE(2, perplexity=perplexity, max_iter=500, init=init, random_state=0).fit_transform(
        np.ascontiguousarray(scaled, dtype=np.float32)
    )
    return found


def pictures(run: Run) -> list[Picture]:
    found = embedding(run)
    if found is None:
        return []
    classes = (run.data or {}).get("classes") or []
    by_client = _scatter(found, found.client, [plain(name) for name in run.names])
    made = [Picture("features-by-client", "Features, by client", _SAYS.format("client"), by_client, half=True)]
    if found.label is not None:
        number = int(found.label.max()) + 1
        names = [plain(classes[k]) if k < len(classes) else str(k) for k in range(number)]
        by_class = _scatter(found, found.label, names)
        made.insert(0, Picture("features-by-class", "Features, by class", _SAYS.format("class"), by_class, half=True))
    return made


_SAYS = (
    "Test examples as each client's own model sees them before its last layer, in two dimensions by t-SNE, "
    "coloured by {}."
)


def _scatter(found: Embedding, group: NDArray[np.int64], names: list[str]) -> go.Figure:
    members = [k for k in range(len(names)) if (group == k).any()]
    made = figure(height=420, showlegend=len(members) <= LEGEND)
    for k in members:
        mine = group == k
        made.add_scatter(
            x=found.at[mine, 0],
            y=found.at[mine, 1],
            mode="markers",
            name=names[k],
            marker={"color": series(k), "size": 5, "opacity": 0.8, "line": {"width": 0}},
            hovertemplate=f"{names[k]}<extra></extra>",
        )
    made.update_xaxes(showticklabels=False, showgrid=False, ticks="")
    made.update_yaxes(showticklabels=False, showgrid=False, ticks="")
    return made
