"""A table and a chart of gains as HTML that stands alone: no script, nothing from a network, every text escaped.

A notebook shows it on a light or on a dark page, so text has the page's own colour.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from coterie.report.style import FONT, OURS, UNSURE, WORSE, number, scale, short_label, unit

MAX_ROWS = 500  # of a table
NAMED_BARS = 60  # so many bars are labelled; more are drawn thinner, without labels
COLOURS = {"gains": OURS, "undecided": UNSURE, "loses": WORSE}
LABEL, PLOT, VALUE = 150, 420, 130  # widths, in pixels
TABLE = "border-collapse:collapse;margin:4px 0;font-size:13px"
CELL = "padding:2px 10px;border-bottom:1px solid rgba(128,128,128,.35)"
SCROLL = "max-height:32em;overflow:auto"


class Bar(NamedTuple):
    """One bar of the chart: a client's gain or a method's mean gain."""

    name: str
    gain: float
    low: float
    high: float
    verdict: str  # one of COLOURS
    dots: Sequence[float] = ()  # drawn upon it: each client's gain


def table(heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]], foot: Sequence[str] = ()) -> str:
    """Return a table; its first column is text, the others are numbers. `foot` is a last row in bold."""

    def row(cells: Sequence[str], tag: str, more: str = "") -> str:
        aligned = (f"{CELL};text-align:{'right' if k else 'left'}{more}" for k in range(len(cells)))
        pairs = zip(cells, aligned, strict=True)
        inner = (f'<{tag} style="{style}">{html.escape(cell)}</{tag}>' for cell, style in pairs)
        return f"<tr>{''.join(inner)}</tr>"

    body = "".join(row(each, "td") for each in rows[:MAX_ROWS])
    if len(rows) > MAX_ROWS:
        more = [f"… and {len(rows) - MAX_ROWS} more: to_pandas() has all", *[""] * (len(columns) - 1)]
        body += row(more, "td")
    last = f"<tfoot>{row(foot, 'td', ';font-weight:bold')}</tfoot>" if foot else ""
    return (
        f'<div style="{SCROLL}"><table style="{TABLE}"><caption style="text-align:left;font-weight:bold;'
        f'caption-side:top;white-space:nowrap;color:inherit">{html.escape(heading)}</caption>'
        f"<thead>{row(columns, 'th')}</thead><tbody>{body}</tbody>{last}</table></div>"
    )


def gain_chart(heading: str, metric: str, bars: Sequence[Bar]) -> str:
    """Return an SVG image with one horizontal bar each, the largest on top, and a line for its interval."""
    known = sorted((bar for bar in bars if math.isfinite(bar.gain)), key=lambda bar: -bar.gain)
    if not known:
        return ""
    labelled = len(known) <= NAMED_BARS
    step = 20 if labelled else max(3, 1200 // len(known))
    top, height = 34, len(known) * step
    reach = [0.0, *(x for bar in known for x in (bar.gain, bar.low, bar.high, *bar.dots) if math.isfinite(x))]
    ticks = _ticks(scale(metric) * min(reach), scale(metric) * max(reach))
    low, high = ticks[0], ticks[-1]

    def x(value: float) -> float:
        return LABEL + PLOT * (scale(metric) * value - low) / (high - low)

    parts = [_legend(known), *(_tick(LABEL + PLOT * (t - low) / (high - low), t, top, height) for t in ticks)]
    for k, bar in enumerate(known):
        parts.append(_bar(bar, metric, top + k * step, step, x, labelled))
    parts.append(f'<line x1="{x(0):.1f}" x2="{x(0):.1f}" y1="{top}" y2="{top + height}" stroke="currentColor"/>')
    whole = f"{LABEL + PLOT + VALUE} {top + height + 24}"
    said = f"{heading}: " + ", ".join(f"{len(mine)} {verdict}" for verdict, mine in _by_verdict(known))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{html.escape(said)}" viewBox="0 0 {whole}" '
        f'style="max-width:{LABEL + PLOT + VALUE}px;width:100%;font:12px {html.escape(FONT)}" fill="currentColor">'
        f'<text x="0" y="12" font-weight="bold">{html.escape(heading)}</text>{"".join(parts)}</svg>'
    )


def _by_verdict(bars: Sequence[Bar]) -> list[tuple[str, list[Bar]]]:
    groups = [(verdict, [bar for bar in bars if bar.verdict == verdict]) for verdict in COLOURS]
    return [(verdict, mine) for verdict, mine in groups if mine]


def _legend(bars: Sequence[Bar]) -> str:
    words, at = [], float(LABEL)
    for verdict, mine in _by_verdict(bars):
        words.append(f'<rect x="{at:.0f}" y="19" width="10" height="10" fill="{COLOURS[verdict]}"/>')
        words.append(f'<text x="{at + 14:.0f}" y="28">{verdict} ({len(mine)})</text>')
        at += 120
    return "".join(words)


def _tick(at: float, value: float, top: int, height: int) -> str:
    label = f"{value:+.4g}".replace("-", "−") if value else "0"
    return (
        f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{top + height}" stroke="currentColor" stroke-opacity=".15"/>'
        f'<text x="{at:.1f}" y="{top + height + 16}" text-anchor="middle" fill-opacity=".75">{label}</text>'
    )


def _bar(bar: Bar, metric: str, y: int, step: int, x: Callable[[float], float], labelled: bool) -> str:
    middle, thick = y + step / 2, max(2.0, step * 0.6)
    left, right = sorted((x(0), x(bar.gain)))
    known = math.isfinite(bar.low) and math.isfinite(bar.high)
    interval = f" ({number(metric, bar.low, '+')} to {number(metric, bar.high, '+')})" if known else ""
    value = f"{number(metric, bar.gain, '+')}{unit(metric)}"
    title = html.escape(f"{bar.name}: {value}{interval}, {bar.verdict}")
    parts = [
        f"<g><title>{title}</title>",
        f'<rect x="{left:.1f}" y="{middle - thick / 2:.1f}" width="{right - left:.1f}" height="{thick:.1f}" '
        f'fill="{COLOURS.get(bar.verdict, UNSURE)}"/>',
    ]
    if known and step > 6:
        parts.append(
            f'<line x1="{x(bar.low):.1f}" x2="{x(bar.high):.1f}" y1="{middle:.1f}" y2="{middle:.1f}" '
            'stroke="currentColor" stroke-width="1.2"/>'
        )
    parts += [
        f'<circle cx="{x(dot):.1f}" cy="{middle:.1f}" r="2.5" fill="none" stroke="currentColor" stroke-opacity=".7"/>'
        for dot in bar.dots
        if math.isfinite(dot)
    ]
    if labelled:
        # `short_label` has escaped it
        parts.append(
            f'<text x="{LABEL - 8}" y="{middle + 4:.1f}" text-anchor="end">{short_label(bar.name, 22)}</text>'
            f'<text x="{LABEL + PLOT + 10}" y="{middle + 4:.1f}">{html.escape(value)}</text>'
        )
    return "".join([*parts, "</g>"])


def _ticks(low: float, high: float) -> list[float]:
    """Return four to nine round numbers that enclose both."""
    span = max(high - low, 1e-12)
    size = 10.0 ** math.floor(math.log10(span))
    step = next(size * part for part in (0.2, 0.5, 1.0, 2.0) if span / (size * part) <= 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(step * k) for k in np.arange(first, max(last, first + 1) + 1)]
