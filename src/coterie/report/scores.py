"""Draws metrics: gains over training alone, curves over rounds, and the spread over clients."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from coterie.report.block import ControlState, Picture
from coterie.report.figure import Trace
from coterie.report.read import Array, RunData
from coterie.report.style import (
    ALONE,
    FAINT,
    INK,
    MUTED,
    OURS,
    UNSURE,
    WORSE,
    figure,
    metric_title,
    metric_words,
    name_axis,
    number,
    scale,
    short_label,
)

MAX_CURVE_POINTS = 12_000  # of all clients' curves of one metric; rounds are left out beyond
VERDICTS = {"gains": OURS, "undecided": UNSURE, "unchanged": UNSURE, "loses": WORSE}


def gains(run: RunData) -> Picture | None:
    """Draw each client's gain as a bar, the largest on top, with intervals if the run has them."""
    found = run.gains()
    if found is None:
        return None
    order = np.argsort(np.nan_to_num(found, nan=-np.inf), kind="stable")[::-1]
    place = {int(client): row for row, client in enumerate(order)}
    rows = run.benefit["clients"] if run.benefit else None
    kinds = (
        [row["verdict"] for row in rows]
        if rows
        else ["gains" if gain > 0 else "loses" if gain < 0 else "unchanged" for gain in found]
    )
    factor, alone, ours = scale(run.metric), run.alone(), run.scores()
    assert alone is not None
    made = figure(height=int(np.clip(22 * len(found) + 90, 180, 1400)), bargap=0.35, showlegend=True)
    for kind, colour in VERDICTS.items():
        mine = [i for i in range(len(found)) if kinds[i] == kind]
        if not mine:
            continue
        bars: Trace = {
            "type": "bar",
            "orientation": "h",
            "y": [place[i] for i in mine],
            "x": factor * found[mine],
            "name": f"{kind} ({len(mine)})",
            "marker": {"color": colour, "line": {"width": 0}},
            "text": [_gain_text(run, i, found, alone, ours) for i in mine],
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
        }
        if rows:
            low, high = (np.array([_end(rows[i], end) for i in mine]) for end in ("low", "high"))
            bars["error_x"] = {
                "type": "data",
                "symmetric": False,
                "array": factor * np.clip(high - found[mine], 0, None),
                "arrayminus": factor * np.clip(found[mine] - low, 0, None),
                "color": INK,
                "thickness": 1,
                "width": 3,
            }
        made.data.append(bars)
    name_axis(made.layout["yaxis"], [run.names[i] for i in order], 60)
    made.update_yaxes(range=[len(found) - 0.4, -0.6], showgrid=False)
    what = f"points of {metric_words(run.metric)}" if factor == 100 else metric_words(run.metric)
    made.update_xaxes(title={"text": f"gain ({what})"}, zeroline=True)
    made.update_xaxes(zerolinecolor=MUTED, zerolinewidth=1)
    level = f"{round(100 * run.benefit.get('level', 0.95))} %" if run.benefit else ""
    caption = "Each bar is one client's test result minus its result alone after the same number of gradient steps" + (
        f"; the line is a {level} interval over its test examples, and a bar is grey if the interval includes zero."
        if level
        else ". This run has no intervals, so a short bar may be due to chance."
    )
    return Picture("gain", "Gain over training alone", caption, made)


def curves(run: RunData) -> Picture | None:
    """Draw every client, the mean, and the mean of training alone, with one state per metric."""
    if not run.metrics:
        return None
    traces = {metric: _curve_traces(run, metric) for metric in run.metrics}
    states = []
    for metric, (each, *means) in traces.items():
        changed = {key: each[key] for key in ("type", "x", "y", "hovertemplate")}  # all else is as in the figure
        states.append(ControlState(metric_title(metric), [changed, *means], metric_title(metric)))
    made = figure(height=380, showlegend=True)
    made.data.extend(traces[run.metrics[0]])
    made.update_xaxes(title={"text": "round"}, showgrid=False)
    made.update_yaxes(title={"text": states[0].axis})
    made.add_vline(x=run.selected, line={"color": MUTED, "width": 1, "dash": "dot"})
    caption = (
        f"Test results round by round: thin lines are clients, the bold one their {run.average_name}; the dotted line "
        f"marks round {run.selected}, selected by {run.average_name} validation {metric_words(run.metric)}."
    )
    return Picture("curves", "Round by round", caption, made, states if len(states) > 1 else [], about="Metric")


def spread(scores: Mapping[str, Array], metric: str, colours: Mapping[str, str]) -> Picture:
    """Draw the distribution of the clients' results, one line per method, as in FedAMP's Figure 2."""
    made = figure(height=int(np.clip(64 * len(scores) + 90, 200, 900)), showlegend=False)
    labels = list(scores)
    for k, (label, values) in enumerate(scores.items()):
        colour = colours[label]
        known = values[~np.isnan(values)]
        made.add(
            "box",
            x=scale(metric) * known,
            y=np.full(len(known), k),
            name=short_label(label),
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
    name_axis(made.layout["yaxis"], labels)
    made.update_yaxes(range=[len(labels) - 0.4, -0.6], showgrid=False)
    made.update_xaxes(title={"text": f"test {metric_title(metric)}"})
    caption = "Every dot is a client. The box contains the middle half of them, and its line is the median."
    return Picture("spread", "Distribution over clients", caption, made)


def thinned(count: int, width: int) -> list[int]:
    """Return positions of at most MAX_CURVE_POINTS / width of `count` rounds, including the first and the last."""
    return sorted(
        set(
            np.linspace(0, count - 1, min(count, max(2, MAX_CURVE_POINTS // max(width, 1))))
            .round()
            .astype(int)
            .tolist()
        )
    )


def _curve_traces(run: RunData, metric: str) -> list[Trace]:
    at, values = run.curve(metric)
    keep = thinned(len(at), len(run.names))
    at, values, factor = at[keep], values[keep], scale(metric)
    shape = "%{y:.1f}" if factor == 100 else "%{y:.4g}"
    mode = "lines" if len(at) > 1 else "markers"
    # All clients are one trace with a gap after each: browsers draw that in a fraction of the time of one trace each.
    x, y = (np.full((len(run.names), len(at) + 1), np.nan, dtype=np.float32) for _ in range(2))
    x[:, :-1], y[:, :-1] = at, factor * values.T
    traces: list[Trace] = [
        {
            "type": "scatter",
            "x": x.ravel(),
            "y": y.ravel(),
            "text": [short_label(name) for name in run.names for _ in range(len(at) + 1)],
            "mode": mode,
            "connectgaps": False,
            "line": {"color": FAINT, "width": 1},
            "marker": {"color": FAINT},
            "name": "a client" if len(run.names) > 1 else short_label(run.names[0]),
            "hovertemplate": f"%{{text}}, round %{{x}}: {shape}<extra></extra>",
        }
    ]
    if run.reference is not None and metric in run.reference.metrics:
        then, theirs = run.reference.curve(metric)
        traces.append(_mean_trace(run, then, theirs, metric, f"{run.average_name}, trained alone", ALONE, "dash"))
    traces.append(_mean_trace(run, at, values, metric, f"{run.average_name}, {short_label(run.method)}", OURS, "solid"))
    return traces


def _mean_trace(run: RunData, at: Array, values: Array, metric: str, name: str, colour: str, dash: str) -> Trace:
    shape = "%{y:.1f}" if scale(metric) == 100 else "%{y:.4g}"
    return {
        "type": "scatter",
        "x": at,
        "y": np.array([scale(metric) * run.average(row) for row in values], dtype=np.float32),
        "mode": "lines" if len(at) > 1 else "markers",
        "line": {"color": colour, "width": 2.5, "dash": dash},
        "marker": {"color": colour},
        "name": name,
        "hovertemplate": f"{name}, round %{{x}}: {shape}<extra></extra>",
    }


def _end(row: Mapping[str, float | None], end: str) -> float:
    value = row.get(end)
    return float("nan") if value is None else float(value)


def _gain_text(run: RunData, i: int, found: Array, alone: Array, ours: Array) -> str:
    text = f"{short_label(run.names[i])}: {number(run.metric, found[i], '+')}"
    if run.benefit:
        row = run.benefit["clients"][i]
        low, high = (number(run.metric, _end(row, end), "+") for end in ("low", "high"))
        text += f" ({low} to {high})"
    return f"{text}<br>alone {number(run.metric, alone[i])}, {short_label(run.method)} {number(run.metric, ours[i])}"
