"""Makes the page about a search: what was tried, what mattered, what was chosen, and how it does on test examples.

It reads what `coterie tune` wrote: search.json, search.jsonl, tuning.json, and the runs in chosen/.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.errors import CheckpointError
from coterie.report import several
from coterie.report.block import ControlState, Note, Page, Picture, Section, Table
from coterie.report.figure import Trace
from coterie.report.group import grouped, with_local
from coterie.report.read import find, read
from coterie.report.style import (
    ALONE,
    FAINT,
    MUTED,
    OURS,
    figure,
    metric_title,
    metric_words,
    name_axis,
    number,
    scale,
    series_colour,
    short_label,
    sign,
    unit,
)
from coterie.storage import files


@dataclass(frozen=True)
class Tried:
    """One candidate: its number, its values, and its mean validation score by round."""

    number: int
    values: dict[str, Any]
    rounds: list[int]
    scores: list[float]

    def best(self, metric: str, until: float = math.inf) -> float:
        """Return the best score up to a round; NaN if there is none."""
        known = [s for r, s in zip(self.rounds, self.scores, strict=True) if r <= until and s == s]
        return (max if sign(metric) > 0 else min)(known, default=math.nan)


@dataclass(frozen=True)
class SearchData:
    """The content of a search's folder."""

    path: Path
    about: dict[str, Any]
    tuning: dict[str, Any]
    tried: dict[str, list[Tried]]  # by method

    @property
    def metric(self) -> str:
        return str(self.tuning["metric"])

    @property
    def rungs(self) -> list[list[int]]:
        """[candidates, round] of each rung."""
        return [[int(value) for value in rung] for rung in self.about["rungs"]]

    def chosen(self, method: str) -> dict[str, Any]:
        found: dict[str, Any] = self.tuning["methods"][method]["chosen"]
        return found

    def score(self, method: str) -> float:
        """Return what was chosen for a method scores on validation data."""
        value = self.chosen(method)[f"validation_{self.metric}"]
        return math.nan if value is None else float(value)


def is_search(path: Path) -> bool:
    """Tell whether a folder holds a search."""
    return (path / "search.json").exists()


def read_search(path: Path) -> SearchData:
    """Read the folder of a search; raise `CheckpointError` if it is not finished or damaged."""
    if not (path / "tuning.json").exists():
        raise CheckpointError(f"the search in '{path}' is not finished: run 'coterie tune' with --out {path} again")
    tried: dict[str, dict[int, Tried]] = {}
    try:
        for line in (path / "search.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            mine = tried.setdefault(record["method"], {})
            number = int(record["candidate"])
            each = mine.setdefault(number, Tried(number, record["values"], [], []))
            for at, score, _ in record["curve"]:
                each.rounds.append(int(at))
                each.scores.append(math.nan if score is None else float(score))
        tuning = files.read_json(path / "tuning.json")
        found = SearchData(path, files.read_json(path / "search.json"), tuning, {})
        ordered = {label: list(tried[label].values()) for label in tuning["methods"]}
        found.tried.update(ordered)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"'{path}' cannot be read as a search: {type(error).__name__} {error}") from error
    return found


def page(path: Path) -> Page:
    """Make the page."""
    data = read_search(path)
    best, metric = str(data.tuning["best"]), data.metric
    where = [path / "chosen"] if (path / "chosen").exists() else []
    runs = with_local([read(each) for each in find(where)]) if where else []
    sections: list[tuple[str, list[Any]]] = [
        ("Chosen", [chosen_table(data), compared(data)]),
        ("What mattered", [importance(data), values_and_scores(data)]),
        ("The search", [curves(data)]),
    ]
    tested: list[Any] = []
    if runs:
        groups = grouped(runs)
        colours = {label: ALONE if label == "local" else series_colour(k) for k, label in enumerate(groups)}
        tested = [several.method_table(groups, metric)]
        if len(groups) > 1:
            tested += [several.gains(groups, metric, colours)]
    sections.append(("Test", tested))
    kept = [Section(name, [block for block in blocks if block is not None]) for name, blocks in sections]
    settings = data.about["settings"]
    return Page(
        f"Search of {len(data.tried)} methods on {settings.get('data')}",
        f"{len(data.about['clients'])} clients, model {settings.get('model')}, seed {settings.get('seed')}",
        verdict(data),
        [
            ("chosen", best, f"{number(metric, data.score(best))} validation {metric_title(metric)}"),
            ("budget", f"{data.tuning['rounds_of_each']} rounds", "of each method, local included"),
            ("candidates", str(data.rungs[0][0]), "of each method"),
        ],
        [section for section in kept if section.blocks],
    )


def verdict(data: SearchData) -> str:
    """Say what was chosen, in two sentences."""
    best, metric = str(data.tuning["best"]), data.metric
    values = _in_words(data.chosen(best)["values"])
    if best == "local":
        return f"On validation data nothing does better than training alone ({values})."
    lead = sign(metric) * (data.score(best) - data.score("local")) if "local" in data.tried else math.nan
    ahead = (
        f", {number(metric, lead)}{unit(metric)} ahead of training alone with the same budget" if lead == lead else ""
    )
    return (
        f"Validation data choose {best} with {values}{ahead}. "
        "The best of many candidates looks better on validation data than it is; the test examples were not seen."
    )


def chosen_table(data: SearchData) -> Table:
    """Return one row per method."""
    metric, rows = data.metric, list[list[Any]]()
    for label, tried in data.tried.items():
        start, score = tried[0], data.score(label)
        rows.append(
            [
                label,
                _in_words(data.chosen(label)["values"]),
                (number(metric, score), score),
                (number(metric, start.best(metric)), start.best(metric)),
                (str(start.rounds[-1] if start.rounds else 0), start.rounds[-1] if start.rounds else 0),
                (str(len(tried)), len(tried)),
                (str(data.tuning["methods"][label]["rounds"]), data.tuning["methods"][label]["rounds"]),
            ]
        )
    columns = [
        "method",
        "chosen",
        f"validation {metric_title(metric)}",
        "as it was",
        "until round",
        "candidates",
        "rounds",
    ]
    caption = (
        "What was chosen for each method, beside the settings that it began with and the round until which these were "
        "kept in the search. All methods have the same number of candidates and rounds."
    )
    return Table("chosen", "What was chosen", columns, rows, caption)


def compared(data: SearchData) -> Picture:
    """Draw every candidate that trained to the end, with one line of dots per method."""
    metric, last = data.metric, data.rungs[-1][1]
    made = figure(height=int(np.clip(46 * len(data.tried) + 90, 180, 900)), showlegend=False)
    labels = list(data.tried)
    for k, label in enumerate(labels):
        full = [each for each in data.tried[label] if each.rounds and each.rounds[-1] == last]
        made.add(
            "scatter",
            x=np.array([scale(metric) * each.best(metric) for each in full]),
            y=np.full(len(full), k),
            mode="markers",
            marker={"color": ALONE if label == "local" else series_colour(k), "size": 10, "opacity": 0.75},
            text=[short_label(_in_words(each.values), 60) for each in full],
            hovertemplate=f"{short_label(label)}: %{{x:.4g}}<br>%{{text}}<extra></extra>",
        )
    name_axis(made.layout["yaxis"], labels)
    made.update_yaxes(range=[len(labels) - 0.4, -0.6], showgrid=False)
    made.update_xaxes(title={"text": f"validation {metric_title(metric)}"})
    caption = "Every dot is a candidate that trained to the end. The best of each method was chosen."
    return Picture("finalists", "The candidates of the last rung", caption, made)


def importance(data: SearchData) -> Picture | Note:
    """Draw what share of the scores' variation each setting explains."""
    rows = [
        (f"{label}: {name}", 100 * float(share))
        for label, found in data.tuning["methods"].items()
        for name, share in sorted(found["importance"].items(), key=lambda each: -each[1])
    ]
    if not rows:
        return Note("There were too few candidates to say which setting mattered.")
    made = figure(height=int(np.clip(24 * len(rows) + 90, 160, 900)), showlegend=False)
    made.add(
        "bar",
        x=np.array([share for _, share in rows]),
        y=list(range(len(rows))),
        orientation="h",
        marker={"color": OURS},
        hovertemplate="%{x:.0f} %<extra></extra>",
    )
    name_axis(made.layout["yaxis"], [name for name, _ in rows], 60)
    made.update_yaxes(range=[len(rows) - 0.4, -0.6], showgrid=False)
    made.update_xaxes(title={"text": "share of the variation (%)"}, range=[0, 100])
    caption = (
        f"How much of the variation between candidates after round {data.rungs[0][1]} each setting explains, alone and "
        "with others (fANOVA). With few candidates this is a rough guess."
    )
    return Picture("importance", "Which settings mattered", caption, made)


def values_and_scores(data: SearchData) -> Picture | None:
    """Draw each setting's values against the scores after the first rung; a control chooses the setting."""
    states = [
        ControlState(short_label(f"{label}: {name}"), _dots(data, label, name))
        for label, tried in data.tried.items()
        for name in tried[0].values
    ]
    if not states:
        return None
    made = figure(height=340, showlegend=False)
    made.data.extend(states[0].traces)
    made.update_xaxes(title={"text": "log₁₀ of the value, or the word"})
    made.update_yaxes(title={"text": f"validation {metric_title(data.metric)}"})
    caption = f"Every dot is a candidate, after round {data.rungs[0][1]}; the one that was chosen is filled."
    return Picture("values", "Values and scores", caption, made, states if len(states) > 1 else [], about="Setting")


def _dots(data: SearchData, label: str, name: str) -> list[Trace]:
    first, chosen = data.rungs[0][1], data.chosen(label)["candidate"]
    shown = [each for each in data.tried[label] if name in each.values]
    numeric = all(isinstance(each.values[name], int | float) and each.values[name] > 0 for each in shown)
    x: Any = [_tick(each.values[name]) for each in shown]
    if numeric:
        x = np.log10([float(each.values[name]) for each in shown])
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "x": x,
            "y": np.array([scale(data.metric) * each.best(data.metric, first) for each in shown]),
            "marker": {
                "size": [13 if each.number == chosen else 9 for each in shown],
                "color": [OURS if each.number == chosen else FAINT for each in shown],
                "line": {"color": OURS, "width": 1.2},
            },
            "text": [f"{name} {_tick(each.values[name])}" for each in shown],
            "hovertemplate": "%{text}: %{y:.4g}<extra></extra>",
        }
    ]


def curves(data: SearchData) -> Picture:
    """Draw the candidates' scores round by round; a control chooses the method."""
    states = [ControlState(short_label(label), _lines(data, label)) for label in data.tried]
    made = figure(height=380, showlegend=False)
    made.data.extend(states[0].traces)
    for _, at in data.rungs[:-1]:
        made.add_vline(x=at, line={"color": MUTED, "width": 1, "dash": "dot"})
    made.update_xaxes(title={"text": "round"}, showgrid=False, range=[0, data.rungs[-1][1] * 1.02])
    made.update_yaxes(title={"text": f"validation {metric_title(data.metric)}"})
    stages = ", ".join(f"{number_} until round {at}" for number_, at in data.rungs)
    caption = (
        f"Mean validation {metric_words(data.metric)} of every candidate ({stages}); at a dotted line only the better "
        "ones go on. The bold line is the one that was chosen."
    )
    return Picture(
        "search", "Candidates round by round", caption, made, states if len(states) > 1 else [], about="Method"
    )


def _lines(data: SearchData, label: str) -> list[Trace]:
    chosen = data.chosen(label)["candidate"]
    order = sorted(data.tried[label], key=lambda each: each.number == chosen)  # the bold one on top
    return [
        {
            "type": "scatter",
            "mode": "lines+markers" if len(each.rounds) < 3 else "lines",
            "x": np.array(each.rounds, dtype=float),
            "y": scale(data.metric) * np.array(each.scores),
            "line": {"color": OURS if each.number == chosen else FAINT, "width": 3 if each.number == chosen else 1.3},
            "marker": {"size": 5},
            "text": [short_label(_in_words(each.values), 60)] * len(each.rounds),
            "hovertemplate": "%{text}<br>round %{x}: %{y:.4g}<extra></extra>",
        }
        for each in order
    ]


def _in_words(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_tick(value)}" for name, value in values.items()) or "nothing to search"


def _tick(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
