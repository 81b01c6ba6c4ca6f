"""Draws figures as SVG, on a background of their own, for light and dark pages. What a colour says is also written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from coterie.experiment.reproduce.figures.panels import Drawing, Panel

WIDTH, HEIGHT, GAP, TOP, LEGEND_ROW, LETTER = 300, 220, 24, 40, 16, 6.4
LEFT, BOTTOM, HEAD = 52, 40, 24  # inside a panel, beside its plot
INK, SOFT, LINE = "#1d2430", "#4a5361", "#e2e5ea"
COLOURS = (
    *("#4269d0", "#e0872b", "#2b7a5b", "#c2452d", "#7d4fa8", "#3aa0c4", "#8a6d3b", "#d0549c", "#6b7280", "#93a62f"),
    *("#1f3d8a", "#f0b36a", "#79b89f", "#e58f7f", "#b79ad1"),
)


def draw(figure: Drawing) -> str:
    """Return the figure as SVG text."""
    panels, columns = figure["panels"], figure["columns"]
    heights = [HEIGHT + _legend_height(panel) + _extra(panel) for panel in panels]
    rows = [heights[start : start + columns] for start in range(0, len(panels), columns)]
    width = columns * (WIDTH + GAP) + GAP
    height = TOP + sum(max(row) + GAP for row in rows)
    title = escape(figure["title"])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-labelledby="title" font-family="sans-serif" font-size="11">',
        f'<title id="title">{title}</title>',
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6" fill="#ffffff" stroke="#c8ccd2"/>',
        f'<text x="16" y="26" font-size="14" font-weight="bold" fill="{INK}">{title}</text>',
    ]
    top: float = TOP
    for k, row in enumerate(rows):
        for column in range(len(row)):
            parts.append(f'<g transform="translate({GAP + column * (WIDTH + GAP)} {top})">')
            parts += _panel(panels[k * columns + column], row[column])
            parts.append("</g>")
        top += max(row) + GAP
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, height: float) -> Iterator[str]:
    yield _text(LEFT, 14, panel["title"], weight="bold")
    low = height - BOTTOM - _legend_height(panel)
    match panel["kind"]:
        case "lines":
            yield from _plane(panel, low, panel["series"], dots=False)
        case "points":
            yield from _plane(panel, low, panel["series"], dots=True)
        case "strips":
            yield from _strips(panel, low)
        case "heatmap" | "bubbles":
            yield from _matrix(panel, low)
    if panel.get("legend"):
        yield from _legend(panel["series"], low + 40)


def _plane(panel: Panel, low: float, series: Sequence[dict[str, Any]], *, dots: bool) -> Iterator[str]:
    curves = panel.get("curves", []) if dots else series
    every = [*series, *panel.get("curves", [])]
    xs = [v for each in every for v in each["x"] if v is not None]
    ys = [v for each in every for v in each["y"] if v is not None]
    if not xs or not ys:
        return
    across, up = _scale(xs, LEFT, WIDTH - 6), _scale(ys, low, HEAD)
    yield from _axes(panel, across, up, low)
    if dots:
        for k, each in enumerate(series):
            colour = COLOURS[k % len(COLOURS)]
            for x, y in _pairs(each):
                yield f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="2" fill="{colour}" fill-opacity="0.7"/>'
    for k, each in enumerate(curves):
        path = "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in _pairs(each))
        colour = COLOURS[k % len(COLOURS)] if not dots or len(curves) == len(series) else INK  # one for all groups
        yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _pairs(series: dict[str, Any]) -> list[tuple[float, float]]:
    """Return the points of a series, without those that have no value."""
    return [(x, y) for x, y in zip(series["x"], series["y"], strict=True) if x is not None and y is not None]


class _Scale:
    """Map values to places, with round numbers for ticks."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self.low, self.high, self.begin, self.end = low, high, begin, end

    def __call__(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / 2))
        step *= next(each for each in (1, 2, 5, 10) if (self.high - self.low) / (step * each) <= 6)
        first = math.ceil(self.low / step - 1e-9)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _scale(values: Sequence[float], begin: float, end: float) -> _Scale:
    low, high = min(values), max(values)
    room = 0.04 * (high - low) or max(abs(high), 1.0) * 0.05
    return _Scale(low - room, high + room, begin, end)


def _axes(panel: Panel, across: _Scale, up: _Scale | None, low: float) -> Iterator[str]:
    for tick in across.ticks():
        x = f"{across(tick):.1f}"
        yield f'<path d="M{x} {HEAD}V{low}" stroke="{LINE}"/>'
        yield _text(across(tick), low + 14, f"{tick:.6g}", anchor="middle", colour=SOFT)
    yield _text((LEFT + WIDTH) / 2, low + 29, panel["x"], anchor="middle", colour=SOFT)
    if up is None:
        return
    for tick in up.ticks():
        y = f"{up(tick):.1f}"
        yield f'<path d="M{LEFT} {y}H{WIDTH - 6}" stroke="{LINE}"/>'
        yield _text(LEFT - 5, up(tick) + 4, f"{tick:.6g}", anchor="end", colour=SOFT)
    yield _turned(12, (low + HEAD) / 2, panel["y"])


def _strips(panel: Panel, low: float) -> Iterator[str]:
    rows = panel["rows"]
    values = [v for row in rows.values() for v in row if v is not None]
    if not values:
        return
    left = 10 + LETTER * max(map(len, rows))
    across = _scale(values, left, WIDTH - 6)
    yield from _axes(panel, across, None, low)
    each = (low - HEAD) / len(rows)
    for k, (label, row) in enumerate(rows.items()):
        middle, colour = HEAD + (k + 0.5) * each, COLOURS[k % len(COLOURS)]
        yield _text(left - 6, middle + 4, label, anchor="end")
        there = sorted(v for v in row if v is not None)
        for i, value in enumerate(there):
            y = middle + (i % 3 - 1) * min(4.0, each / 4)  # so that dots on the same place can be told apart
            yield f'<circle cx="{across(value):.1f}" cy="{y:.1f}" r="2" fill="{colour}" fill-opacity="0.55"/>'
        at, tall = across(there[len(there) // 2]), each / 2.4
        yield f'<path d="M{at:.1f} {middle - tall:.1f}V{middle + tall:.1f}" stroke="#111111" stroke-width="2"/>'


def _matrix(panel: Panel, low: float) -> Iterator[str]:
    values = [[0.0 if v is None else v for v in row] for row in panel["values"]]
    high = max((v for row in values for v in row), default=0.0) or 1.0
    wide, tall = (WIDTH - 6 - LEFT) / max(1, len(values[0])), (low - HEAD) / len(values)
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            x, y, share = LEFT + j * wide, HEAD + i * tall, max(value, 0.0) / high
            if panel["kind"] == "heatmap":
                shade = 255 - round(200 * share)
                colour = f"#{shade:02x}{255 - round(150 * share):02x}{255 - round(75 * share):02x}"
                area = f'width="{wide + 0.05:.2f}" height="{tall + 0.05:.2f}"'  # without a gap between two
                yield f'<rect x="{x:.1f}" y="{y:.1f}" {area} fill="{colour}"/>'
            elif share > 0:
                radius = 0.5 * min(wide, tall) * math.sqrt(share) * 1.6
                yield (
                    f'<circle cx="{x + wide / 2:.1f}" cy="{y + tall / 2:.1f}" r="{radius:.1f}" '
                    f'fill="{COLOURS[0]}" fill-opacity="0.6"/>'
                )
    for j in _every(len(values[0])):
        yield _text(LEFT + (j + 0.5) * wide, low + 14, str(j), anchor="middle", colour=SOFT)
    for i in _every(len(values)):
        yield _text(LEFT - 5, HEAD + (i + 0.5) * tall + 4, str(i), anchor="end", colour=SOFT)
    yield _text((LEFT + WIDTH) / 2, low + 29, panel["x"], anchor="middle", colour=SOFT)
    yield _turned(12, (low + HEAD) / 2, panel["y"])


def _every(number: int) -> range:
    return range(0, number, max(1, math.ceil(number / 8)))


def _legend(series: Sequence[dict[str, Any]], top: float) -> Iterator[str]:
    for k, each in enumerate(series):
        y = top + k * LEGEND_ROW
        yield f'<rect x="{LEFT}" y="{y}" width="12" height="4" fill="{COLOURS[k % len(COLOURS)]}"/>'
        yield _text(LEFT + 18, y + 6, each["label"])


def _legend_height(panel: Panel) -> float:
    return LEGEND_ROW * len(panel["series"]) + 8 if panel.get("legend") else 0


def _extra(panel: Panel) -> float:
    """Return how much taller than usual a panel is: strips need room for their rows, matrices to be square."""
    if panel["kind"] == "strips":
        return max(0, 22 * len(panel["rows"]) - 150)
    return 60 if panel["kind"] == "heatmap" else 0


def _text(x: float, y: float, text: str, *, anchor: str = "start", colour: str = INK, weight: str = "normal") -> str:
    how = f'text-anchor="{anchor}" fill="{colour}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {how}>{escape(text)}</text>'


def _turned(x: float, y: float, text: str) -> str:
    return (
        f'<text transform="translate({x} {y:.1f}) rotate(-90)" text-anchor="middle" fill="{SOFT}">{escape(text)}</text>'
    )
