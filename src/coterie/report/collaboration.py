"""Who learns from whom: the matrix of weights over rounds, the same as a graph, and one client's weights over time.

Methods tell it as `collaboration` [clients, clients] each round, rows the clients that learn. Clients are ordered so
that groups stand out as blocks: leaves of average-linkage clustering, neighbours as alike as possible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from coterie.report.block import Picture, State, Trace
from coterie.report.read import Array, Run, numbers
from coterie.report.style import EDGE, HIGH, INK, LOW, MIDDLE, OURS, figure, name_axis, plain, series

MOST = 120  # clients that are shown
CELLS = 250_000  # of all matrices of a page; of more rounds, some are left out
EDGES = 400  # the heaviest, of a graph
BINS = ((0.1, 0.8), (0.25, 1.6), (0.45, 2.8), (0.65, 4.2), (0.85, 6.0))  # share of the largest weight -> line width
LINES = 6  # of the others' weights over time


@dataclass(frozen=True)
class Weights:
    names: list[str]  # in order
    rounds: list[int]
    matrices: Array  # [T, shown, shown], in order
    total: int  # clients there are


def weights(run: Run, share: float = 1.0) -> Weights | None:
    """What the run says of who learned from whom, thinned to `share` of a page's room; None if it says nothing."""
    n = len(run.names)
    found = [(record["round"], record.get("server", {}).get("collaboration")) for record in run.rounds]
    known = [(at, matrix) for at, matrix in found if matrix is not None and np.shape(matrix) == (n, n)]
    if not known or n < 2:
        return None
    last = next((matrix for at, matrix in known if at == run.selected), known[-1][1])
    ordered = order(_matrix(last))
    shown: NDArray[np.intp] = ordered[np.linspace(0, n - 1, min(n, MOST)).round().astype(int)]
    frames = int(np.clip(share * CELLS // len(shown) ** 2, 2, 80))
    keep = sorted({int(k) for k in np.linspace(0, len(known) - 1, min(frames, len(known))).round()})
    matrices = np.array([_matrix(known[k][1])[np.ix_(shown, shown)] for k in keep])
    return Weights([run.names[i] for i in shown], [known[k][0] for k in keep], matrices, n)


def order(matrix: Array) -> NDArray[np.intp]:
    """An order in which clients that learn from each other are neighbours."""
    alike = np.nan_to_num(0.5 * (matrix + matrix.T))
    np.fill_diagonal(alike, 0)
    apart = alike.max() - alike
    np.fill_diagonal(apart, 0)
    if len(matrix) < 3 or not apart.any():
        return np.argsort(np.zeros(len(matrix)), kind="stable")
    tree = linkage(squareform(apart, checks=False), "average", optimal_ordering=len(matrix) <= 200)
    return np.asarray(leaves_list(tree), dtype=np.intp)


def pictures(run: Run, share: float = 1.0, group: str = "rounds") -> list[Picture]:
    found = weights(run, share)
    if found is None:
        vector = counts_over_time(run)
        return [vector] if vector else []
    others = found.matrices * (1 - np.eye(len(found.names)))
    top = float(np.nanmax(others)) or 1.0
    start = max((k for k, at in enumerate(found.rounds) if at <= run.selected), default=0)
    few = f" Of {found.total} clients, {len(found.names)} are shown." if found.total > len(found.names) else ""
    return [
        _matrix_picture(found, top, start, group, few),
        _graph_picture(found, start, group),
        _one_client(found, run.names),
    ]


def counts_over_time(run: Run) -> Picture | None:
    """For methods that give each client one weight for all (FedMAP)."""
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
        made.add_scatter(
            x=at,
            y=values[:, i].astype(np.float32),
            mode="lines+markers" if len(at) < 3 else "lines",
            name=plain(name),
            line={"color": series(i), "width": 1.8},
            hovertemplate=f"{plain(name)}, round %{{x}}: %{{y:.3f}}<extra></extra>",
        )
    made.add_hline(y=1 / len(run.names), line={"color": INK, "width": 1, "dash": "dot"})
    made.update_xaxes(title_text="round", showgrid=False)
    made.update_yaxes(title_text="weight")
    says = "How much each client counts in what all are sent; on the dotted line all would count alike."
    return Picture("weights", "What each client counts", says, made)


def _matrix_picture(found: Weights, top: float, start: int, group: str, few: str) -> Picture:
    names = [plain(name) for name in found.names]
    labels = [[f"{one} from {other}" if one != other else f"{one}, itself" for other in names] for one in names]
    made = figure(height=430)
    made.add_heatmap(
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
    name_axis(made.layout.xaxis, found.names, 25)
    name_axis(made.layout.yaxis, found.names, 25)
    made.update_xaxes(title_text="learns from", showgrid=False, constrain="domain", tickangle=-45)
    made.update_yaxes(autorange="reversed", showgrid=False, scaleanchor="x", constrain="domain")
    states = [State(f"{at}", [{"z": found.matrices[k].astype(np.float32)}]) for k, at in enumerate(found.rounds)]
    says = (
        "A row shows whom a client learns from; clients that learn from each other stand side by side, so groups are "
        f"blocks, and the scale ends at the largest weight of another client.{few}"
    )
    about = {"control": "slider", "about": "Round", "group": group, "start": start, "half": True}
    return Picture("collaboration", "Who learns from whom", says, made, states if len(states) > 1 else [], **about)  # type: ignore[arg-type]


def _graph_picture(found: Weights, start: int, group: str) -> Picture:
    n = len(found.names)
    angle = np.pi / 2 - 2 * np.pi * np.arange(n) / n
    x, y = np.cos(angle), np.sin(angle)
    edges = [_edges(matrix, x, y) for matrix in found.matrices]
    made = figure(height=430, showlegend=False)
    for (_, width), (ex, ey) in zip(BINS, edges[start], strict=True):
        line = {"color": EDGE, "width": width}
        made.add_scatter(x=ex, y=ey, mode="lines", line=line, opacity=0.3 + 0.1 * width, hoverinfo="skip")
    few = n <= 24
    made.add_scatter(
        x=x,
        y=y,
        mode="markers",
        marker={"size": 12 if few else 7, "color": OURS, "line": {"width": 0}},
        text=[plain(name) for name in found.names],
        hovertemplate="%{text}<extra></extra>",
    )
    for i in range(n) if few else ():
        made.add_annotation(
            x=1.13 * x[i],
            y=(1.18 if abs(x[i]) < 0.3 else 1.1) * y[i],
            text=plain(found.names[i], 14),
            showarrow=False,
            font={"size": 11, "color": INK},
            xanchor="center" if abs(x[i]) < 0.3 else "left" if x[i] > 0 else "right",
        )
    room = 1.65 if few else 1.15
    made.update_xaxes(visible=False, range=[-room, room])
    made.update_yaxes(visible=False, range=[-1.3, 1.3], scaleanchor="x")
    states = [State(f"{at}", [*({"x": ex, "y": ey} for ex, ey in edges[k]), {}]) for k, at in enumerate(found.rounds)]
    says = "The same as a graph, in the same order around the circle: the thicker a line, the more two clients share."
    about = {"control": "slider", "about": "Round", "group": group, "start": start, "half": True}
    return Picture("graph", "The coteries", says, made, states if len(states) > 1 else [], **about)  # type: ignore[arg-type]


def _edges(matrix: Array, x: Array, y: Array) -> list[tuple[list[float | None], list[float | None]]]:
    """Lines by bin of weight, which is the larger of the two directions."""
    i, j = np.triu_indices(len(matrix), 1)
    weight = np.nan_to_num(np.maximum(matrix[i, j], matrix[j, i]))
    share = weight / (weight.max() if weight.size and weight.max() > 0 else 1.0)
    kept = np.argsort(-share, kind="stable")[:EDGES]
    ends = [*(low for low, _ in BINS[1:]), np.inf]
    found = []
    for (low, _), end in zip(BINS, ends, strict=True):
        mine = [k for k in kept if low <= share[k] < end]
        xs: list[float | None] = [v for k in mine for v in (round(x[i[k]], 3), round(x[j[k]], 3), None)]
        ys: list[float | None] = [v for k in mine for v in (round(y[i[k]], 3), round(y[j[k]], 3), None)]
        found.append((xs, ys))
    return found


def _one_client(found: Weights, names: list[str]) -> Picture:
    """FedeRiCo's Figures 5 and 7."""
    known = [found.names.index(name) for name in names if name in found.names]
    states = [State(plain(found.names[i]), _lines(found, i)) for i in known]
    made = figure(height=360, showlegend=True)
    made.add_traces(states[0].traces)
    made.update_xaxes(title_text="round", showgrid=False)
    made.update_yaxes(title_text="weight", rangemode="tozero")
    says = f"Whom one client learns from, over time: itself, and the {LINES} others that ever weigh most"
    says += "; a click on a name in the legend shows or hides it."
    return Picture("client-weights", "One client's sources", says, made, states, about="Client")


def _lines(found: Weights, i: int) -> list[Trace]:
    row = found.matrices[:, i]  # [T, shown]
    heaviest = [j for j in np.argsort(-row.max(0), kind="stable") if j != i][:LINES]
    mode = "lines" if len(found.rounds) > 2 else "lines+markers"
    dwarfs = bool(row[:, i].max() > 4 * row[:, heaviest].max(initial=0) > 0)
    # As many traces for every client, so that one state can take the place of another.
    return [
        {
            "type": "scatter",
            "x": found.rounds,
            "y": row[:, j].astype(np.float32),
            "mode": mode,
            "visible": "legendonly" if j == i and dwarfs else True,
            "name": "itself" if j == i else plain(found.names[j]),
            "line": {"color": INK if j == i else series(k - 1), "width": 2.5 if j == i else 1.8},
            "hovertemplate": f"{plain(found.names[j])}, round %{{x}}: %{{y:.3f}}<extra></extra>",
        }
        for k, j in enumerate([i, *heaviest])
    ]


def _matrix(values: object) -> Array:
    found: Array = np.nan_to_num(np.array(values, dtype=float))
    return found
