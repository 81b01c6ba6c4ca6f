"""The look of figures: a palette that colour-blind readers can distinguish, and one base layout.

Figures are made for a light page. On a dark page, the script replaces each of their colours by that in `DARK`.
"""

from __future__ import annotations

import copy
import html
from collections.abc import Sequence
from typing import Any

from coterie.evaluation.metrics import better, is_known
from coterie.report.figure import Figure

INK, MUTED, GRID, FAINT = "#1a2129", "#56616e", "#e4e8ed", "#b3bfcb"
OURS, ALONE, WORSE, UNSURE = "#0b6aa8", "#b86a00", "#bf3f24", "#8d99a6"
LOW, MIDDLE, HIGH = "#f3f7fb", "#6fa8d0", "#0a4c7d"  # colour scale of weights
EDGE = "#0b6aa9"
# Paul Tol's muted scheme for colour-blind readers, and a tenth colour; then they repeat.
SERIES = (
    *("#cc6677", "#332288", "#ddaa33", "#117733", "#88ccee", "#882255", "#44aa99", "#999933", "#aa4499"),
    "#777777",
)
DARK = {
    **{INK: "#e9eef3", MUTED: "#a3b0bd", GRID: "#2b333c", FAINT: "#55616e"},
    **{OURS: "#5cb3ec", ALONE: "#f0a848", WORSE: "#f2836b", UNSURE: "#7f8b98"},
    **{LOW: "#1b232c", MIDDLE: "#33709f", HIGH: "#9ad4ff", EDGE: "#5cb3ed"},
    **{"#332288": "#9a8ff0", "#117733": "#4fc07a", "#882255": "#e07bab", "#aa4499": "#d684c8", "#777777": "#b5b5b5"},
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
CLEAR = "rgba(0,0,0,0)"
PERCENT = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "f1", "bmta")
SHORT = {"auroc": "AUROC", "macro_f1": "macro F1", "rmse": "RMSE", "r2": "R²", "ece": "calibration error", "f1": "F1"}


def figure(height: int = 340, **layout: Any) -> Figure:
    """Make an empty figure with the base layout."""
    axis: dict[str, Any] = {
        "gridcolor": GRID,
        "zeroline": False,
        "linecolor": GRID,
        "tickcolor": GRID,
        "automargin": True,
    }
    axis |= {"title": {"font": {"color": MUTED, "size": 12}, "standoff": 8}, "tickfont": {"color": MUTED, "size": 11}}
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"color": INK, "size": 12}}
    base = {
        "height": height,
        "font": {"family": FONT, "size": 12, "color": INK},
        "margin": {"l": 12, "r": 16, "t": 12, "b": 12},
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "hoverlabel": {"font": {"family": FONT, "size": 12}},
        "legend": {**legend, "itemsizing": "constant"},
        "dragmode": False,
        "hovermode": "closest",
        "xaxis": axis,
        "yaxis": copy.deepcopy(axis),
    }
    return Figure(layout=base | layout)


def series_colour(i: int) -> str:
    """Return the colour of the i-th series."""
    return SERIES[i % len(SERIES)]


def short_label(name: object, most: int = 26) -> str:
    """Return a name as a label: shortened, and without mark-up."""
    text = str(name)
    return html.escape(text if len(text) <= most else f"{text[: most - 1]}…", quote=False)


def name_axis(axis: Any, names: Sequence[str], most: int = 40) -> None:
    """Label the positions 0, 1, ... of an axis; if there are many, label only as many as are readable."""
    every = max(1, -(-len(names) // most))
    places = list(range(0, len(names), every))
    axis.update(tickmode="array", tickvals=places, ticktext=[short_label(names[i]) for i in places])


def is_percent(metric: str) -> bool:
    """Return whether the metric is shown in percent."""
    return metric.removeprefix("global_") in PERCENT


def scale(metric: str) -> float:
    """Return the factor from a metric's value to what is shown."""
    return 100.0 if is_percent(metric) else 1.0


def sign(metric: str) -> int:
    """Return 1 if more is better, else -1."""
    return -1 if is_known(metric) and better(metric) is min else 1


def metric_words(metric: str) -> str:
    """Return the name of a metric as text."""
    return SHORT.get(metric, metric.replace("_", " "))


def metric_title(metric: str) -> str:
    """Return the name of a metric with its unit."""
    return f"{metric_words(metric)} (%)" if is_percent(metric) else metric_words(metric)


def number(metric: str, value: float, plus: str = "") -> str:
    """Format a value, or a difference with its sign, in the metric's unit."""
    if value != value:
        return "–"
    text = f"{100 * value:{plus}.1f}" if is_percent(metric) else f"{value:{plus}.3g}"
    text = text if float(text) else text.lstrip("+-")
    return text.replace("-", "−")


def unit(metric: str) -> str:
    """Return the unit of differences of a metric."""
    return " points" if is_percent(metric) else ""
