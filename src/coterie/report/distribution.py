"""Draws which client has which classes, and how many examples each client has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.report.figure import Figure
from coterie.report.style import GRID, OURS, figure, name_axis, short_label

MAX_BUBBLE_PIXELS = 26.0


def bubbles(counts: NDArray[Any], clients: Sequence[str], classes: Sequence[str]) -> Figure:
    """Draw a bubble for each of `counts` [clients, classes]; its area is the number of examples."""
    counts = np.asarray(counts, dtype=float)
    i, k = np.nonzero(counts > 0)
    values = counts[i, k]
    room = 0.9 * 640 / max(len(clients), 1)  # width of a column, so that neighbouring bubbles do not touch
    largest = float(np.clip(room, 5, MAX_BUBBLE_PIXELS))
    made = figure(height=int(np.clip(24 * len(classes) + 110, 180, 640)), showlegend=False)
    texts = [
        f"{short_label(clients[a])}<br>class {short_label(classes[b])}: {v:,.0f} examples"
        for a, b, v in zip(i.tolist(), k.tolist(), values, strict=True)
    ]
    marker = {"color": OURS, "opacity": 0.75, "line": {"width": 0}, "sizemode": "area"}
    marker |= {"size": values, "sizeref": 2 * max(float(values.max(initial=1)), 1) / largest**2, "sizemin": 1.5}
    made.add("scatter", x=i, y=k, mode="markers", marker=marker, text=texts, hovertemplate="%{text}<extra></extra>")
    name_axis(made.layout["xaxis"], clients, 25)
    name_axis(made.layout["yaxis"], classes, 30)
    made.update_xaxes(range=[-0.6, len(clients) - 0.4], showgrid=False, tickangle=-45 if len(clients) > 4 else 0)
    made.update_yaxes(range=[len(classes) - 0.4, -0.6], gridcolor=GRID, title={"text": "class"})
    return made


def sizes(counts: NDArray[Any], clients: Sequence[str]) -> Figure:
    """Draw the number of examples per client, from `counts` [clients] or [clients, classes]."""
    counts = np.asarray(counts, dtype=float)
    totals = counts.sum(1) if counts.ndim > 1 else counts
    made = figure(height=260, showlegend=False, bargap=0.25)
    made.add(
        "bar",
        x=np.arange(len(clients)),
        y=totals,
        marker={"color": OURS, "line": {"width": 0}},
        text=[short_label(name) for name in clients],
        textposition="none",
        hovertemplate="%{text}: %{y:,.0f} examples<extra></extra>",
    )
    name_axis(made.layout["xaxis"], clients, 25)
    made.update_xaxes(showgrid=False, tickangle=-45 if len(clients) > 4 else 0)
    made.update_yaxes(title={"text": "examples"}, rangemode="tozero")
    return made
