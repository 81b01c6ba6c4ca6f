"""Shows what the clients take home, if they chose, and how that changes who gains and who loses."""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.report.block import Note, Picture, Table
from coterie.report.read import RunData, mean, numbers
from coterie.report.scores import VERDICTS
from coterie.report.style import (
    FAINT,
    MUTED,
    figure,
    metric_title,
    metric_words,
    name_axis,
    number,
    scale,
    short_label,
    unit,
)

KEPT = {"federated": "federated", "average": "average of both", "local": "its local model"}
WHY = {
    "better": "better on validation data",
    "undecided": "not shown to be better",
    "few examples": "too few validation examples",
    "not asked": "",
}


def blocks(run: RunData) -> list[Any]:
    """Return the blocks of the section; empty if the clients had no choice."""
    found = run.take_home
    if not found:
        return []
    return [Note(sentence(run)), picture(run), table(run)]


def sentence(run: RunData) -> str:
    """Say how many clients keep what, and how many gain and lose by it."""
    assert run.take_home is not None
    kept = run.take_home["kept"]
    words = (
        f"By their own validation data, {kept['federated']} clients keep the federated model, {kept['average']} the "
        f"average of its predictions with those of their local model, and {kept['local']} their local model."
    )
    after, before = run.take_home.get("benefit"), run.benefit
    if not after or not before:
        return words
    told = [
        f"{each['overall']['gains']} gain and {each['overall']['loses']} lose by {which}, on average "
        f"{number(run.metric, each['overall']['mean_gain'], '+')}{unit(run.metric)}"
        for which, each in (("the federated model", before), ("what they take home", after))
    ]
    return f"{words} Compared with training alone, {'; '.join(told)}."


def picture(run: RunData) -> Picture | None:
    """Draw each client's gain by the federated model and by what it takes home, with the latter's interval."""
    assert run.take_home is not None
    after, before = run.take_home.get("benefit"), run.benefit
    if not after or not before:
        return None
    factor = scale(run.metric)
    first, then = (factor * numbers([row["gain"] for row in each["clients"]]) for each in (before, after))
    order = np.argsort(np.nan_to_num(first, nan=-np.inf), kind="stable")[::-1]
    place = {int(client): row for row, client in enumerate(order)}
    made = figure(height=int(np.clip(22 * len(first) + 100, 190, 1400)), showlegend=True)
    for i in range(len(first)):
        made.add(
            "scatter",
            x=[first[i], then[i]],
            y=[place[i], place[i]],
            mode="lines",
            line={"color": FAINT, "width": 2},
            showlegend=False,
            hoverinfo="skip",
        )
    names = [short_label(name) for name in run.names]
    made.add(
        "scatter",
        x=first,
        y=[place[i] for i in range(len(first))],
        mode="markers",
        name="federated model",
        marker={"color": MUTED, "size": 9, "symbol": "circle-open", "line": {"width": 2}},
        text=names,
        hovertemplate="%{text}, federated: %{x:.3g}<extra></extra>",
    )
    for verdict, colour in VERDICTS.items():
        mine = [i for i, row in enumerate(after["clients"]) if row["verdict"] == verdict]
        if not mine:
            continue
        low, high = (factor * numbers([after["clients"][i][end] for i in mine]) for end in ("low", "high"))
        made.add(
            "scatter",
            x=then[mine],
            y=[place[i] for i in mine],
            mode="markers",
            name=f"taken home: {verdict} ({len(mine)})",
            marker={"color": colour, "size": 9},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": np.clip(high - then[mine], 0, None),
                "arrayminus": np.clip(then[mine] - low, 0, None),
                "color": colour,
                "thickness": 1,
                "width": 3,
            },
            text=[f"{names[i]}: {KEPT[run.take_home['clients'][i]['kept']]}" for i in mine],
            hovertemplate="%{text}, %{x:.3g}<extra></extra>",
        )
    name_axis(made.layout["yaxis"], [run.names[i] for i in order], 60)
    made.update_yaxes(range=[len(first) - 0.4, -0.6], showgrid=False)
    what = f"points of {metric_words(run.metric)}" if factor == 100 else metric_words(run.metric)
    made.update_xaxes(title={"text": f"gain over training alone ({what})"}, zeroline=True)
    made.update_xaxes(zerolinecolor=MUTED, zerolinewidth=1)
    caption = (
        "Rings: the federated model. Dots: what the client chose by its own validation data, with an interval over its "
        "test examples. A client that keeps its local model is at zero."
    )
    return Picture("take-home", "Gain before and after the choice", caption, made)


def table(run: RunData) -> Table:
    """Return one row per client."""
    assert run.take_home is not None
    metric, after = run.metric, run.take_home.get("benefit")
    clients = run.take_home["clients"]
    warm = any(row["temperature"] is not None for row in clients)
    cut = any(row["threshold"] is not None for row in clients)
    columns = ["client", "validation", "takes home", "why", "test"]
    columns += ["temperature"] * warm + ["threshold"] * cut + (["gain", "interval", "verdict"] if after else [])
    rows: list[list[Any]] = []
    for i, row in enumerate(clients):
        scored = float(numbers([row["test"][metric]])[0])
        held, examples = bool(row.get("cross_validated")), row["validation_examples"]
        why = WHY[row["reason"]].replace("validation data", "examples held out") if held else WHY[row["reason"]]
        cells: list[Any] = [row["client"], (f"{examples}{' in folds' * held}", examples)]
        cells += [KEPT[row["kept"]], why, (number(metric, scored), scored)]
        shown = [row["temperature"]] * warm + [row["threshold"]] * cut
        cells += [("–" if value is None else f"{value:.2f}", value) for value in shown]
        if after:
            gain, low, high = numbers([after["clients"][i][key] for key in ("gain", "low", "high")])
            ends = f"{number(metric, low, '+')} to {number(metric, high, '+')}"
            cells += [(number(metric, gain, "+"), gain), (ends, low), after["clients"][i]["verdict"]]
        rows.append(cells)
    average = mean(numbers([row["test"][metric] for row in clients]))
    total = [f"mean of {len(rows)}", "", "", "", number(metric, average), *[""] * (warm + cut)]
    if after:
        total += [number(metric, after["overall"]["mean_gain"], "+"), "", ""]
    errors = run.config.get("take_home_errors", 0.5)  # earlier versions had no such setting
    caption = (
        f"Test {metric_title(metric)} of the model that a client keeps. It keeps its local model unless another one's "
        f"loss is better by more than {errors:g} standard error{'s' * (errors != 1)} on examples of its own that "
        "neither model has seen: those for validation or, in folds, all that are not for testing."
    )
    return Table("take-home-clients", "What each client takes home", columns, rows, caption, [total])
