"""Figures of metrics: gains over training alone, curves over rounds, and how clients are spread."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go

from coterie.report.block import Picture, State, Trace
from coterie.report.read import Array, Run, mean
from coterie.report.style import (
    ALONE,
    FAINT,
    INK,
    MUTED,
    OURS,
    UNSURE,
    WORSE,
    figure,
    name_axis,
    number,
    plain,
    scale,
    title,
    words,
)

POINTS = 12_000  # of all clients' curves of one metric; of more rounds, some are left out
VERDICTS = {"gains": OURS, "cannot tell": UNSURE, "even": UNSURE, "loses": WORSE}


def gains(run: Run) -> Picture | None:
    """FedAMP-style bars, the largest gain on top; with intervals where the run has them."""
    found = run.gains()
    if found is None:
        return None
    order = np.argsort(np.nan_to_num(found, nan=-np.inf), kind="stable")[::-1]
    place = {int(client): row for row, client in enumerate(order)}
    rows = run.benefit["clients"] if run.benefit else None
    kinds = (
        [row["verdict"] for row in rows]
        if rows
        else ["gains" if gain > 0 else "loses" if gain < 0 else "even" for gain in found]
    )
    factor, alone, ours = scale(run.metric), run.alone(), run.scores()
    assert alone is not None
    made = figure(height=int(np.clip(22 * len(found) + 90, 180, 1400)), bargap=0.35, showlegend=True)
    for kind, colour in VERDICTS.items():
        mine = [i for i in range(len(found)) if kinds[i] == kind]
        if not mine:
            continue
        bars = go.Bar(
            orientation="h",
            y=[place[i] for i in mine],
            x=factor * found[mine],
            name=f"{kind} ({len(mine)})",
            marker={"color": colour, "line": {"width": 0}},
            text=[_gain_words(run, i, found, alone, ours) for i in mine],
            textposition="none",
            hovertemplate="%{text}<extra></extra>",
        )
        if rows:
            low, high = (np.array([_end(rows[i], end) for i in mine]) for end in ("low", "high"))
            bars.error_x = {
                "type": "data",
                "symmetric": False,
                "array": factor * np.clip(high - found[mine], 0, None),
                "arrayminus": factor * np.clip(found[mine] - low, 0, None),
                "color": INK,
                "thickness": 1,
                "width": 3,
            }
        made.add_trace(bars)
    name_axis(made.layout.yaxis, [run.names[i] for i in order], 60)
    made.update_yaxes(range=[len(found) - 0.4, -0.6], showgrid=False)
    what = f"points of {words(run.metric)}" if factor == 100 else words(run.metric)
    made.update_xaxes(title_text=f"gain ({what})", zeroline=True)
    made.update_xaxes(zerolinecolor=MUTED, zerolinewidth=1)
    level = f"{round(100 * run.benefit.get('level', 0.95))} %" if run.benefit else ""
    says = "Each bar is one client's test result minus what it reaches alone with as many gradient steps" + (
        f"; the line is a {level} interval over its test examples, and grey bars are those whose interval holds zero."
        if level
        else ". This run has no intervals, so a short bar may be chance."
    )
    return Picture("gain", "Gain over training alone", says, made)


def curves(run: Run) -> Picture | None:
    """Every client, the mean, and the mean of training alone; one state a metric."""
    if not run.metrics:
        return None
    states = [State(title(metric), _curve_traces(run, metric), title(metric)) for metric in run.metrics]
    made = figure(height=380, showlegend=True)
    made.add_traces(states[0].traces)
    made.update_xaxes(title_text="round", showgrid=False)
    made.update_yaxes(title_text=states[0].axis)
    made.add_vline(x=run.selected, line={"color": MUTED, "width": 1, "dash": "dot"})
    says = (
        f"Test results round by round: thin lines are clients, the bold one their mean; "
        f"the dotted line marks round {run.selected}, selected by mean validation {words(run.metric)}."
    )
    return Picture("curves", "Round by round", says, made, states if len(states) > 1 else [], about="Metric")


def spread(scores: Mapping[str, Array], metric: str, colours: Mapping[str, str]) -> Picture:
    """FedAMP's Figure 2: how the clients' results are distributed, one line a method."""
    made = figure(height=int(np.clip(64 * len(scores) + 90, 200, 900)), showlegend=False)
    labels = list(scores)
    for k, (label, values) in enumerate(scores.items()):
        colour = colours[label]
        known = values[~np.isnan(values)]
        made.add_box(
            x=scale(metric) * known,
            y=np.full(len(known), k),
            name=plain(label),
            orientation="h",
            boxpoints="all",
            pointpos=0,
            jitter=0.5,
            width=0.6,
            fillcolor="rgba(0,0,0,0)",
            line={"color": colour, "width": 1.5},
            marker={"color": colour, "size": 6, "opacity": 0.55},
            hovertemplate="%{x:.1f}<extra></extra>" if scale(metric) == 100 else "%{x:.4g}<extra></extra>",
        )
    name_axis(made.layout.yaxis, labels)
    made.update_yaxes(range=[len(labels) - 0.4, -0.6], showgrid=False)
    made.update_xaxes(title_text=f"test {title(metric)}")
    says = "Every dot is a client; the box holds the middle half of them, and its line is the median."
    return Picture("spread", "How clients fare", says, made)


def thinned(count: int, width: int) -> list[int]:
    """Positions of at most POINTS / width of `count` rounds, with the first and the last."""
    return sorted(
        set(np.linspace(0, count - 1, min(count, max(2, POINTS // max(width, 1)))).round().astype(int).tolist())
    )


def _curve_traces(run: Run, metric: str) -> list[Trace]:
    at, values = run.curve(metric)
    keep = thinned(len(at), len(run.names))
    at, values, factor = at[keep], values[keep], scale(metric)
    shape = "%{y:.1f}" if factor == 100 else "%{y:.4g}"
    mode = "lines" if len(at) > 1 else "markers"
    traces: list[Trace] = [
        {
            "type": "scatter",
            "x": at,
            "y": (factor * values[:, i]).astype(np.float32),
            "mode": mode,
            "line": {"color": FAINT, "width": 1},
            "marker": {"color": FAINT},
            "name": "a client" if len(run.names) > 1 else plain(name),
            "legendgroup": "clients",
            "showlegend": i == 0,
            "hovertemplate": f"{plain(name)}, round %{{x}}: {shape}<extra></extra>",
        }
        for i, name in enumerate(run.names)
    ]
    if run.reference is not None and metric in run.reference.metrics:
        then, theirs = run.reference.curve(metric)
        traces.append(_mean_trace(then, theirs, metric, "mean, trained alone", ALONE, "dash"))
    traces.append(_mean_trace(at, values, metric, f"mean, {plain(run.method)}", OURS, "solid"))
    return traces


def _mean_trace(at: Array, values: Array, metric: str, name: str, colour: str, dash: str) -> Trace:
    shape = "%{y:.1f}" if scale(metric) == 100 else "%{y:.4g}"
    return {
        "type": "scatter",
        "x": at,
        "y": np.array([scale(metric) * mean(row) for row in values], dtype=np.float32),
        "mode": "lines" if len(at) > 1 else "markers",
        "line": {"color": colour, "width": 2.5, "dash": dash},
        "marker": {"color": colour},
        "name": name,
        "hovertemplate": f"{name}, round %{{x}}: {shape}<extra></extra>",
    }


def _end(row: Mapping[str, float | None], end: str) -> float:
    value = row.get(end)
    return float("nan") if value is None else float(value)


def _gain_words(run: Run, i: int, found: Array, alone: Array, ours: Array) -> str:
    told = f"{plain(run.names[i])}: {number(run.metric, found[i], '+')}"
    if run.benefit:
        row = run.benefit["clients"][i]
        low, high = (number(run.metric, _end(row, end), "+") for end in ("low", "high"))
        told += f" ({low} to {high})"
    return f"{told}<br>alone {number(run.metric, alone[i])}, {plain(run.method)} {number(run.metric, ours[i])}"
