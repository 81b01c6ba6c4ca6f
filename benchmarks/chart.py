"""A chart of horizontal bars as SVG, each with the mark of its target.

It brings its own background, for light and dark pages. What a colour says is also written beside the bar.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from telling import cell, limit

WIDTH, ROW, TOP, BOTTOM, LETTER = 860, 24, 44, 46, 6.7
REACHED, MISSED, PLAIN = "#2b7a5b", "#c2452d", "#5778a4"


def reached(bar: dict[str, Any]) -> bool:
    return bool(bar["value"] <= bar["target"] if bar["at_most"] else bar["value"] >= bar["target"])


def words(bar: dict[str, Any], judged: bool) -> str:
    if bar["target"] is None or not judged:
        return cell(float(bar["value"]))
    return f"{cell(float(bar['value']))} ({limit(bar)}: {'reached' if reached(bar) else 'missed'})"


def ticks(low: float, high: float, log: bool) -> list[float]:
    """Round numbers in between: 1, 2 and 5 times powers of ten, or as many equal steps as are easy to read."""
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        each = (1, 2, 5) if high / low < 200 else (1,)
        return [digit * 10.0**power for power in powers for digit in each if low <= digit * 10.0**power <= high]
    size = 10.0 ** math.floor(math.log10(high))
    step = next(size * part for part in (0.1, 0.2, 0.25, 0.5, 1, 2) if high / (size * part) <= 6)
    return [step * i for i in range(int(high / step) + 1)]


def draw(title: str, bars: Sequence[dict[str, Any]], *, log: bool = False, judged: bool = True) -> str:
    told = [words(bar, judged) for bar in bars]
    spoken = [f"{bar['label']}: {text}" for bar, text in zip(bars, told, strict=True)]
    left = 20 + LETTER * max(len(bar["label"]) for bar in bars)
    right = WIDTH - 20 - LETTER * max(map(len, told))
    values = [number for bar in bars for number in (bar["value"], bar["target"]) if number is not None and number > 0]
    high = 1.05 * max(values, default=1.0)
    low = 0.8 * min(*values, 1.25) if log else 0.0  # a bar of ratio 1 has no length if no other is shorter
    height = TOP + ROW * len(bars) + BOTTOM

    def at(value: float) -> float:
        value = min(max(value, low), high)
        share = math.log(value / low) / math.log(high / low) if log else value / high
        return round(left + share * (right - left), 1)

    end = TOP + ROW * len(bars) + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title desc" font-family="sans-serif" font-size="12">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="desc">{escape("; ".join(spoken))}</desc>',
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6" fill="#ffffff" stroke="#c8ccd2"/>',
        f'<text x="16" y="26" font-size="14" font-weight="bold" fill="#1d2430">{escape(title)}</text>',
    ]
    for tick in ticks(low, high, log):
        x = at(tick)
        parts.append(f'<path d="M{x} {TOP - 4}V{end}" stroke="#e2e5ea"/>')
        parts.append(f'<text x="{x}" y="{end + 16}" text-anchor="middle" fill="#4a5361">{tick:g}</text>')
    for i, (bar, text) in enumerate(zip(bars, told, strict=True)):
        y, aimed = TOP + ROW * i, bar["target"] is not None and judged
        colour = (REACHED if reached(bar) else MISSED) if aimed else PLAIN
        length = round(max(at(bar["value"]) - left, 1.0), 1)
        parts.append(
            f'<text x="{left - 8:.1f}" y="{y + 16}" text-anchor="end" fill="#1d2430">{escape(bar["label"])}</text>'
        )
        parts.append(f'<rect x="{left:.1f}" y="{y + 4}" width="{length}" height="{ROW - 8}" rx="2" fill="{colour}"/>')
        if bar["target"] is not None:
            parts.append(f'<path d="M{at(bar["target"])} {y + 1}v{ROW - 2}" stroke="#111111" stroke-width="2.5"/>')
        parts.append(f'<text x="{right + 8:.1f}" y="{y + 16}" fill="#1d2430">{escape(text)}</text>')
    aim = "black marks: targets" if any(bar["target"] is not None for bar in bars) else "no targets"
    scale = "logarithmic scale; " if log else ""
    parts.append(f'<text x="{left:.1f}" y="{end + 34}" fill="#4a5361">{scale}{aim}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
