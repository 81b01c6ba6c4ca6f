"""Makes the page about a recommendation: the methods that were tried, who gains and who loses, and what to run.

It reads recommendation.json, which `coterie recommend` and `coterie flower recommend` write. Over Flower nobody has
looked at labels and inputs, and what a site scored is known of those sites only that took part in every fold.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.errors import CheckpointError
from coterie.report.block import Note, Page, Picture, Section, Table
from coterie.report.style import (
    ALONE,
    OURS,
    UNSURE,
    WORSE,
    figure,
    is_percent,
    metric_title,
    metric_words,
    name_axis,
    number,
    scale,
    short_label,
    unit,
)
from coterie.storage import files

FILE = "recommendation.json"
LOCAL = "local"
COLOURS = {"gains": OURS, "undecided": UNSURE, "loses": WORSE}
Rows = list[tuple[str, float, float, float, str]]  # name, value, ends of its interval, colour


def is_recommendation(path: Path) -> bool:
    """Tell whether a folder holds a recommendation."""
    return (path / FILE).exists()


def page(path: Path) -> Page:
    """Make the page.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        return _page(files.read_json(path / FILE))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"'{path / FILE}' cannot be read as a recommendation: {type(error).__name__} {error}"
        ) from error


def _page(found: dict[str, Any]) -> Page:
    look, choice, settings = found["look"], found["choice"], found["settings"]
    sizes = f"{look['least']} to {look['most']} examples each, without those for testing"
    who = by_site(found)
    sections = [
        Section("Methods", [methods_table(found), over_local(found)]),
        Section("Sites", [block for block in (who, _looked(look)) if block is not None]),
        Section("Settings", [settings_table(settings)]),
    ]
    return Page(
        f"Recommended: {found['method']}",
        f"{look['sites']} sites, model {settings.get('model')}, {settings.get('rounds')} rounds",
        verdict(found),
        [
            ("sites", str(look["sites"]), sizes),
            ("tried", f"{len(choice['scores'])} methods", f"{found['budget']} rounds to tune each, in every fold"),
            ("folds", str(found["folds"]), "every example was predicted by a model that had not seen it"),
        ],
        [section for section in sections if section.blocks],
    )


def verdict(found: dict[str, Any]) -> str:
    """Say in two sentences what is recommended, and how sure that is."""
    choice, metric, method = found["choice"], found["metric"], found["method"]
    if method == LOCAL:
        others = [label for label in choice["scores"] if label != LOCAL]
        if choice["best"] == LOCAL:
            return f"Let every site train alone: none of {', '.join(others)} does better on held-out examples."
        return (
            f"Let every site train alone: no method is known to beat it. {choice['best']} scores best, but its lead "
            "may be chance, or within a standard error, and local sends nothing."
        )
    lead = choice["over_local"][method]
    return (
        f"{method} is {_amount(metric, lead['mean'])} better than training alone on average over the sites (interval "
        f"{_interval(metric, lead)}, for all methods of the panel together)."
    )


def methods_table(found: dict[str, Any]) -> Table:
    """Return one row per method."""
    choice, metric, rows = found["choice"], found["metric"], list[list[Any]]()
    for label, score in choice["scores"].items():
        value, cost, lead = _float(score), found["costs"][label], choice["over_local"].get(label)
        gain = ["", ""] if lead is None else [_amount(metric, lead["mean"], "+"), _interval(metric, lead)]
        kilobytes, minutes = cost["bytes_a_site"] / 1e3, cost["minutes"]
        costs = [(f"{kilobytes:,.1f}", kilobytes), (f"{minutes:.2g}", minutes)]
        rows.append([label, (number(metric, value), value), *gain, *costs])
    rows += [[label, (f"not tried: {why}", -math.inf), "", "", "", ""] for label, why in found["left_out"].items()]
    columns = ["method", metric_title(metric), "over local", "interval", "kB by and to a site", "minutes"]
    caption = (
        "On examples that were held out of tuning and training, the mean over sites. Of all methods within a standard "
        "error of the best, the one that sends least is taken, if it is known to beat local. Costs are of a whole run."
    )
    return Table("methods", "What was tried", columns, rows, caption)


def over_local(found: dict[str, Any]) -> Picture | Note:
    """Draw each method's gain over training alone, with its interval."""
    leads = found["choice"]["over_local"]
    if not leads:
        return Note("There was no other method than local to try.")
    rows: Rows = []
    for label, lead in leads.items():
        mean, low, high = (_float(lead[key]) for key in ("mean", "low", "high"))
        rows.append((label, mean, low, high, OURS if low > 0 else WORSE if high < 0 else UNSURE))
    caption = (
        f"How much better than training alone each method is, on average over the sites, with intervals that hold for "
        f"all {len(rows)} together. Right of the dashed line, a method is better."
    )
    return _intervals("over-local", "Over training alone", caption, found["metric"], rows)


def by_site(found: dict[str, Any]) -> Picture | None:
    """Draw each site's gain by the candidate; None if that is local."""
    benefit = found["choice"]["benefit"]
    if benefit is None:
        return None
    clients = sorted(benefit["clients"], key=lambda each: -_float(each["gain"]))
    rows: Rows = [
        (each["client"], _float(each["gain"]), _float(each["low"]), _float(each["high"]), COLOURS[each["verdict"]])
        for each in clients
    ]
    caption = (
        f"Each site's gain by {found['choice']['candidate']} over training alone, with its 95 % interval: blue sites "
        "gain, red ones lose, and grey ones have too few examples to tell."
    )
    return _intervals("by-site", "Who gains and who loses", caption, found["metric"], rows)


def settings_table(settings: dict[str, Any]) -> Table:
    """Return the settings that federation.toml has."""
    flat = {key: value for key, value in settings.items() if not isinstance(value, dict)}
    flat |= {
        f"{table}.{key}": value
        for table, values in settings.items()
        if isinstance(values, dict)
        for key, value in values.items()
    }
    rows = [[key, str(value)] for key, value in flat.items()]
    return Table("settings", "federation.toml", ["setting", "value"], rows, "Run them: coterie run federation.toml")


def _looked(look: dict[str, Any]) -> Note | None:
    """Say how far the sites' labels and inputs are apart, if somebody has looked."""
    lines = []
    if look["labels"] is not None:
        away, chance = look["labels"]
        lines.append(
            f"To match all sites together, {100 * away:.0f} % of a typical site's labels would have to change "
            f"({100 * chance:.0f} % by chance)."
        )
    if look["inputs"] is not None:
        away, chance = look["inputs"]
        lines.append(
            f"A typical site's mean input is {away:.2f} standard deviations from that of all ({chance:.2f} by chance)."
        )
    return Note(" ".join(lines)) if lines else None


def _intervals(name: str, heading: str, caption: str, metric: str, rows: Rows) -> Picture:
    """Draw values with their intervals, one line each."""
    made = figure(height=int(np.clip(30 * len(rows) + 100, 160, 1400)), showlegend=False)
    for k, (label, value, low, high, colour) in enumerate(rows):
        ends, here = np.array([scale(metric) * low, scale(metric) * high]), np.array([scale(metric) * value])
        line = {"color": colour, "width": 3}
        made.add("scatter", x=ends, y=np.full(2, k), mode="lines", line=line, hoverinfo="skip")
        made.add(
            "scatter",
            x=here,
            y=np.full(1, k),
            mode="markers",
            marker={"color": colour, "size": 11},
            hovertemplate=f"{short_label(label)}: %{{x:.4g}}<extra></extra>",
        )
    made.add_vline(x=0, line={"color": ALONE, "width": 1.5, "dash": "dash"})
    name_axis(made.layout["yaxis"], [label for label, *_ in rows], 60)
    made.update_yaxes(range=[len(rows) - 0.4, -0.6], showgrid=False)
    made.update_xaxes(title={"text": f"gain ({'points of ' * is_percent(metric)}{metric_words(metric)})"})
    return Picture(name, heading, caption, made)


def _amount(metric: str, value: float | None, plus: str = "") -> str:
    return f"{number(metric, _float(value), plus)}{unit(metric)}"


def _interval(metric: str, lead: dict[str, Any]) -> str:
    low, high = (number(metric, _float(lead[key]), "+") for key in ("low", "high"))
    return f"[{low}, {high}]"


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)
