"""Draws who learns from whom: the weight matrix over rounds, the same as a graph, and one client's weights over time.

Methods report the matrix as `collaboration` [clients, clients] each round; its rows are the clients that learn. Clients
are ordered by average-linkage clustering, so that groups stand out as blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.report.block import ControlState, Picture
from coterie.report.figure import Trace
from coterie.report.read import Array, RunData, numbers
from coterie.report.style import EDGE, HIGH, INK, LOW, MIDDLE, OURS, figure, name_axis, series_colour, short_label

MAX_CLIENTS_SHOWN = 120  # in the matrix and the graph
MAX_MATRIX_CELLS = 250_000  # of all matrices on a page; rounds are left out beyond
MAX_EDGES = 400  # of a graph: the heaviest
LINE_WIDTHS = (
    (0.1, 0.8),
    (0.25, 1.6),
    (0.45, 2.8),
    (0.65, 4.2),
    (0.85, 6.0),
)  # share of the largest weight -> line width
MAX_SOURCES = 6  # other clients in the figure of one client's weights


@dataclass(frozen=True)
class Weights:
    """The weights to draw, with clients in the order of `cluster_order`."""

    names: list[str]
    rounds: list[int]
    matrices: Array  # [rounds, shown, shown]
    total: int  # number of all clients


def weights(run: RunData, share: float = 1.0) -> Weights | None:
    """Return who learned from whom, thinned to `share` of the room on a page; None if the run does not record it."""
    n = len(run.names)
    found = [(record["round"], record.get("server", {}).get("collaboration")) for record in run.rounds]
    known = [(at, matrix) for at, matrix in found if matrix is not None and np.shape(matrix) == (n, n)]
    if not known or n < 2:
        return None
    last = next((matrix for at, matrix in known if at == run.selected), known[-1][1])
    ordered = cluster_order(_matrix(last))
    shown: NDArray[np.intp] = ordered[np.linspace(0, n - 1, min(n, MAX_CLIENTS_SHOWN)).round().astype(int)]
    frames = int(np.clip(share * MAX_MATRIX_CELLS // len(shown) ** 2, 2, 80))
    keep = sorted({int(k) for k in np.linspace(0, len(known) - 1, min(frames, len(known))).round()})
    matrices = np.array([_matrix(known[k][1])[np.ix_(shown, shown)] for k in keep])
    return Weights([run.names[i] for i in shown], [known[k][0] for k in keep], matrices, n)


def cluster_order(matrix: Array) -> NDArray[np.intp]:
    """Return an order in which clients that learn from each other are neighbours."""
    alike = np.nan_to_num(0.5 * (matrix + matrix.T))
    np.fill_diagonal(alike, 0)
    distance = alike.max() - alike
    np.fill_diagonal(distance, 0)
    if len(matrix) < 3 or not distance.any():
        return np.argsort(np.zeros(len(matrix)), kind="stable")
    from scipy.cluster.hierarchy import leaves_list, linkage  # here, since most runs have no matrix to put in order
    from scipy.spatial.distance import squareform

    tree = linkage(squareform(distance, checks=False), "average", optimal_ordering=len(matrix) <= 200)
    return np.asarray(leaves_list(tree), dtype=np.intp)


def pictures(run: RunData, share: float = 1.0, group: str = "rounds") -> list[Picture]:
    """Return the figures of a run; empty if its method records no weights."""
    found = weights(run, share)
    if found is None:
        vector = weights_over_time(run)
        return [vector] if vector else []
    others = found.matrices * (1 - np.eye(len(found.names)))
    top = float(np.nanmax(others)) or 1.0
    start = max((k for k, at in enumerate(found.rounds) if at <= run.selected), default=0)
    few = f" {len(found.names)} of {found.total} clients are shown." if found.total > len(found.names) else ""
    return [
        _matrix_picture(found, top, start, group, few),
        _graph_picture(found, start, group),
        _one_client(found, run.names),
    ]


def weights_over_time(run: RunData) -> Picture | None:
    """Draw each client's weight in the average, for methods with one weight per client (FedMAP)."""
    known = [
        (record["round"], numbers(record["server"]["weight"]))
        for record in run.rounds
        if np.shape(record.get("server", {}).get("weight")) == (len(run.names),)
    ]
    if not known or len(run.names) < 2:
        return None
    at, values = [each[0] for each in known], np.array([each[1] for each in known])
    made = figure(height=340, showlegend=len(run.names) <= 12)
    for i, name in enumerate(run.names):
        made.add(
            "scatter",
            x=at,
            y=values[:, i].astype(np.float32),
            mode="lines+markers" if len(at) < 3 else "lines",
            name=short_label(name),
            line={"color": series_colour(i), "width": 1.8},
            hovertemplate=f"{short_label(name)}, round %{{x}}: %{{y:.3f}}<extra></extra>",
        )
    made.add_hline(y=1 / len(run.names), line={"color": INK, "width": 1, "dash": "dot"})
    made.update_xaxes(title={"text": "round"}, showgrid=False)
    made.update_yaxes(title={"text": "weight"})
    caption = "The weight of each client in the average that all receive; the dotted line marks equal weights."
    return Picture("weights", "Weight of each client", caption, made)


def _matrix_picture(found: Weights, top: float, start: int, group: str, few: str) -> Picture:
    names = [short_label(name) for name in found.names]
    labels = [[f"{one} from {other}" if one != other else f"{one}, itself" for other in names] for one in names]
    made = figure(height=430)
    made.add(
        "heatmap",
        z=found.matrices[start].astype(np.float32),
        zmin=0,
        zmax=top,
        colorscale=[[0, LOW], [0.5, MIDDLE], [1, HIGH]],
        xgap=1 if len(found.names) <= 40 else 0,
        ygap=1 if len(found.names) <= 40 else 0,
        customdata=labels,
        hovertemplate="%{customdata}: %{z:.3f}<extra></extra>",
        colorbar={"thickness": 10, "len": 0.8, "outlinewidth": 0, "tickfont": {"size": 11}},
    )
    name_axis(made.layout["xaxis"], found.names, 25)
    name_axis(made.layout["yaxis"], found.names, 25)
    made.update_xaxes(title={"text": "learns from"}, showgrid=False, constrain="domain", tickangle=-45)
    made.update_yaxes(autorange="reversed", showgrid=False, scaleanchor="x", constrain="domain")
    states = [ControlState(f"{at}", [{"z": found.matrices[k].astype(np.float32)}]) for k, at in enumerate(found.rounds)]
    caption = (
        "A row shows whom a client learns from. Clients that learn from each other are next to each other, so groups "
        f"appear as blocks. The scale ends at the largest weight of another client.{few}"
    )
    about = {"control": "slider", "about": "Round", "group": group, "start": start, "half": True}
    return Picture("collaboration", "Who learns from whom", caption, made, states if len(states) > 1 else [], **about)  # type: ignore[arg-type]


def _graph_picture(found: Weights, start: int, group: str) -> Picture:
    n = len(found.names)
    angle = np.pi / 2 - 2 * np.pi * np.arange(n) / n
    x, y = np.cos(angle), np.sin(angle)
    edges = [_edges(matrix, x, y) for matrix in found.matrices]
    made = figure(height=430, showlegend=False)
    for (_, width), (ex, ey) in zip(LINE_WIDTHS, edges[start], strict=True):
        line = {"color": EDGE, "width": width}
        made.add("scatter", x=ex, y=ey, mode="lines", line=line, opacity=0.3 + 0.1 * width, hoverinfo="skip")
    few = n <= 24
    made.add(
        "scatter",
        x=x,
        y=y,
        mode="markers",
        marker={"size": 12 if few else 7, "color": OURS, "line": {"width": 0}},
        text=[short_label(name) for name in found.names],
        hovertemplate="%{text}<extra></extra>",
    )
    for i in range(n) if few else ():
        made.add_annotation(
            x=1.13 * x[i],
            y=(1.18 if abs(x[i]) < 0.3 else 1.1) * y[i],
            text=short_label(found.names[i], 14),
            showarrow=False,
            font={"size": 11, "color": INK},
            xanchor="center" if abs(x[i]) < 0.3 else "left" if x[i] > 0 else "right",
        )
    room = 1.65 if few else 1.15
    made.update_xaxes(visible=False, range=[-room, room])
    made.update_yaxes(visible=False, range=[-1.3, 1.3], scaleanchor="x")
    states = [
        ControlState(f"{at}", [*({"x": ex, "y": ey} for ex, ey in edges[k]), {}]) for k, at in enumerate(found.rounds)
    ]
    caption = (
        "The same weights as a graph, with clients in the same order: the thicker a line, the more two clients share."
    )
    about = {"control": "slider", "about": "Round", "group": group, "start": start, "half": True}
    return Picture("graph", "The coteries", caption, made, states if len(states) > 1 else [], **about)  # type: ignore[arg-type]


def _edges(matrix: Array, x: Array, y: Array) -> list[tuple[list[float | None], list[float | None]]]:
    """Return lines by bin of weight; the weight of a pair is the larger of its two directions."""
    i, j = np.triu_indices(len(matrix), 1)
    weight = np.nan_to_num(np.maximum(matrix[i, j], matrix[j, i]))
    share = weight / (weight.max() if weight.size and weight.max() > 0 else 1.0)
    kept = np.argsort(-share, kind="stable")[:MAX_EDGES]
    ends = [*(low for low, _ in LINE_WIDTHS[1:]), np.inf]
    found = []
    for (low, _), end in zip(LINE_WIDTHS, ends, strict=True):
        mine = [k for k in kept if low <= share[k] < end]
        xs: list[float | None] = [v for k in mine for v in (round(x[i[k]], 3), round(x[j[k]], 3), None)]
        ys: list[float | None] = [v for k in mine for v in (round(y[i[k]], 3), round(y[j[k]], 3), None)]
        found.append((xs, ys))
    return found


def _one_client(found: Weights, names: list[str]) -> Picture:
    """Draw one client's weights over time, as in FedeRiCo's Figures 5 and 7."""
    known = [found.names.index(name) for name in names if name in found.names]
    states = [ControlState(short_label(found.names[i]), _lines(found, i)) for i in known]
    made = figure(height=360, showlegend=True)
    made.data.extend(states[0].traces)
    made.update_xaxes(title={"text": "round"}, showgrid=False)
    made.update_yaxes(title={"text": "weight"}, rangemode="tozero")
    caption = f"Whom one client learns from over time: itself, and the {MAX_SOURCES} others with the largest weights"
    caption += ". Click a name in the legend to show or hide it."
    return Picture("client-weights", "One client's sources", caption, made, states, about="Client")


def _lines(found: Weights, i: int) -> list[Trace]:
    row = found.matrices[:, i]  # [T, shown]
    heaviest = [j for j in np.argsort(-row.max(0), kind="stable") if j != i][:MAX_SOURCES]
    mode = "lines" if len(found.rounds) > 2 else "lines+markers"
    dwarfs = bool(row[:, i].max() > 4 * row[:, heaviest].max(initial=0) > 0)
    # Every client has the same number of traces, so that one state can replace another.
    return [
        {
            "type": "scatter",
            "x": found.rounds,
            "y": row[:, j].astype(np.float32),
            "mode": mode,
            "visible": "legendonly" if j == i and dwarfs else True,
            "name": "itself" if j == i else short_label(found.names[j]),
            "line": {"color": INK if j == i else series_colour(k - 1), "width": 2.5 if j == i else 1.8},
            "hovertemplate": f"{short_label(found.names[j])}, round %{{x}}: %{{y:.3f}}<extra></extra>",
        }
        for k, j in enumerate([i, *heaviest])
    ]


def _matrix(values: object) -> Array:
    found: Array = np.nan_to_num(np.array(values, dtype=float))
    return found
