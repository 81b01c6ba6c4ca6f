"""A figure as plotly.js reads it: traces and a layout, plain dicts.

plotly's own figures check every property, which takes longer than the rest of a report. The tests let it check ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Trace = dict[str, Any]
Layout = dict[str, Any]


@dataclass
class Figure:
    """Traces, in the order in which they are drawn, and a layout."""

    data: list[Trace] = field(default_factory=list)
    layout: Layout = field(default_factory=dict)

    def add(self, kind: str, **properties: Any) -> None:
        """Add a trace of a kind of plotly.js's: scatter, bar, box, heatmap."""
        self.data.append({"type": kind, **properties})

    def add_annotation(self, **properties: Any) -> None:
        """Add a text."""
        self.layout.setdefault("annotations", []).append(properties)

    def add_hline(self, y: float, line: dict[str, Any]) -> None:
        """Add a horizontal line over the whole width."""
        self._add_line(line, x0=0, x1=1, xref="x domain", y0=y, y1=y, yref="y")

    def add_vline(self, x: float, line: dict[str, Any]) -> None:
        """Add a vertical line over the whole height."""
        self._add_line(line, x0=x, x1=x, xref="x", y0=0, y1=1, yref="y domain")

    def update_xaxes(self, **properties: Any) -> None:
        """Change the x axis; what is not named stays as it is, at every depth."""
        merge(self.layout.setdefault("xaxis", {}), properties)

    def update_yaxes(self, **properties: Any) -> None:
        """Change the y axis likewise."""
        merge(self.layout.setdefault("yaxis", {}), properties)

    def _add_line(self, line: dict[str, Any], **place: Any) -> None:
        self.layout.setdefault("shapes", []).append({"type": "line", "line": line, **place})


def merge(into: dict[str, Any], changes: dict[str, Any]) -> None:
    """Change a dict in place; dicts within it are changed likewise, and not replaced."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value
