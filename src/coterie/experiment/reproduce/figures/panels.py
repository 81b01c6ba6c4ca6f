"""What a figure shows, as JSON values, from which it is drawn again at any time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Panel = dict[str, Any]
Drawing = dict[str, Any]  # {"title", "panels": [Panel], "columns"}


def drawing(title: str, panels: Sequence[Panel], columns: int = 3) -> Drawing:
    """Return a figure of several panels, so many beside each other."""
    return {"title": title, "panels": list(panels), "columns": min(columns, max(1, len(panels)))}


def lines(
    title: str, x: str, y: str, series: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, legend: bool = True
) -> Panel:
    """Return curves: label -> (x values, y values)."""
    curves = [{"label": label, "x": _short(xs), "y": _short(ys)} for label, (xs, ys) in series.items()]
    return {"kind": "lines", "title": title, "x": x, "y": y, "series": curves, "legend": legend}


def points(
    title: str,
    x: str,
    y: str,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    *,
    legend: bool = False,
) -> Panel:
    """Return points in the plane, by group, and curves over them in the groups' colours."""
    over = [{"label": label, "x": _short(xs), "y": _short(ys)} for label, (xs, ys) in (curves or {}).items()]
    dots = [{"label": label, "x": _short(xs), "y": _short(ys)} for label, (xs, ys) in series.items()]
    return {"kind": "points", "title": title, "x": x, "y": y, "series": dots, "curves": over, "legend": legend}


def strips(title: str, x: str, rows: Mapping[str, Sequence[float]]) -> Panel:
    """Return the distribution of values in rows, a dot for each and a mark at their median."""
    return {"kind": "strips", "title": title, "x": x, "rows": {label: _short(row) for label, row in rows.items()}}


def heatmap(title: str, x: str, y: str, values: Sequence[Sequence[float]]) -> Panel:
    """Return a matrix, from white (0) to dark (its largest value)."""
    return {"kind": "heatmap", "title": title, "x": x, "y": y, "values": [_short(row, 3) for row in values]}


def bubbles(title: str, x: str, y: str, values: Sequence[Sequence[float]]) -> Panel:
    """Return circles whose areas are the values of a matrix."""
    return {"kind": "bubbles", "title": title, "x": x, "y": y, "values": [_short(row) for row in values]}


def _short(values: Sequence[float], digits: int = 4) -> list[float | None]:
    """Round to so many digits that count; NaN is null."""
    return [None if value != value else float(f"{float(value):.{digits}g}") for value in values]
