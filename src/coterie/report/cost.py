"""Draws what a run costs: bytes sent, and seconds per round."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from coterie.core.units import bytes_in_words, unit_of_bytes
from coterie.report.block import Picture
from coterie.report.read import RunData, numbers
from coterie.report.style import ALONE, OURS, UNSURE, figure, short_label


def duration(seconds: float) -> str:
    """Format a duration."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def sent(run: RunData) -> float:
    """Return the bytes sent in all rounds, in both directions."""
    return float(sum(record.get("bytes_up", 0) + record.get("bytes_down", 0) for record in run.rounds))


def seconds(run: RunData) -> float:
    """Return the seconds that all rounds took."""
    return float(np.nansum(numbers([record.get("seconds") for record in run.rounds])))


def pictures(run: RunData) -> list[Picture]:
    """Return the figures of traffic and time per round."""
    at = [record["round"] for record in run.rounds]
    if not at:
        return []
    up, down = (numbers([record.get(f"bytes_{way}", 0) for record in run.rounds]) for way in ("up", "down"))
    largest = float(np.nanmax(np.concatenate([up, down])))
    unit, name = unit_of_bytes(largest)
    traffic = figure(height=280, barmode="stack", bargap=0.2, showlegend=True)
    for values, label, colour in ((up, "sent by clients", OURS), (down, "received by clients", ALONE)):
        hover = f"round %{{x}}: %{{y:.3g}} {name}<extra>{label}</extra>"
        traffic.add("bar", x=at, y=values / unit, name=label, marker={"color": colour}, hovertemplate=hover)
    traffic.update_xaxes(title={"text": "round"}, showgrid=False)
    traffic.update_yaxes(title={"text": f"{name} per round"}, rangemode="tozero")
    time = figure(height=280, bargap=0.2, showlegend=False)
    values = numbers([record.get("seconds") for record in run.rounds])
    time.add("bar", x=at, y=values, marker={"color": UNSURE}, hovertemplate="round %{x}: %{y:.3g} s<extra></extra>")
    time.update_xaxes(title={"text": "round"}, showgrid=False)
    time.update_yaxes(title={"text": "seconds per round"}, rangemode="tozero")
    totals = f"{bytes_in_words(float(up.sum()))} sent and {bytes_in_words(float(down.sum()))} received"
    both = f"All clients together: {totals} in {len(at)} rounds."
    total = (
        f"Training and evaluation took {duration(seconds(run))} in total, on the machine that simulated the clients."
    )
    return [
        Picture("bytes", "Bytes sent", both, traffic, half=True),
        Picture("seconds", "Time", total, time, half=True),
    ]


def compared(runs: Mapping[str, list[RunData]], colours: Mapping[str, str]) -> Picture:
    """Draw one bar per method."""
    made = figure(height=int(np.clip(34 * len(runs) + 80, 160, 700)), bargap=0.35, showlegend=False)
    totals = [float(np.mean([sent(run) for run in group])) for group in runs.values()]
    unit, name = unit_of_bytes(max(totals, default=0))
    made.add(
        "bar",
        orientation="h",
        x=[total / unit for total in totals],
        y=list(range(len(runs))),
        marker={"color": [colours[label] for label in runs]},
        text=[f"{short_label(label)}: {bytes_in_words(total)}" for label, total in zip(runs, totals, strict=True)],
        textposition="none",
        hovertemplate="%{text}<extra></extra>",
    )
    made.update_yaxes(range=[len(runs) - 0.4, -0.6], showgrid=False)
    made.update_yaxes(
        tickmode="array", tickvals=list(range(len(runs))), ticktext=[short_label(label) for label in runs]
    )
    made.update_xaxes(title={"text": f"{name} in all rounds"}, rangemode="tozero")
    return Picture("bytes", "Bytes sent", "Bytes that all clients of a run send and receive, in all its rounds.", made)
