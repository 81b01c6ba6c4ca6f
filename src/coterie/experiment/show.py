"""How a result or a comparison is shown in a notebook: as HTML, as a plotly figure, and as a pandas data frame."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import CoterieError
from coterie.evaluation import Benefit
from coterie.evaluation.benefit import UNDECIDED
from coterie.evaluation.metrics import AVERAGES, mean
from coterie.report import inline, scores
from coterie.report.block import Picture
from coterie.report.read import RunData
from coterie.report.several import gain_dots
from coterie.report.style import ALONE, metric_title, number, series_colour

if TYPE_CHECKING:
    from coterie.experiment.result import Result
    from coterie.experiment.several.comparison import Comparison

GAIN = "Gain over training alone"
What = Literal["gain", "rounds", "clients"]
CHOICES: tuple[What, ...] = ("gain", "rounds", "clients")
NO_PANDAS = "to_pandas() needs pandas, which is not installed: pip install pandas"
NOBODY_ALONE = "No client was trained alone for comparison, so gains are unknown"


def result_html(result: Result) -> str:
    """Return a run's table, one row per client, and the chart of gains if clients were trained alone as well."""
    metric, method, alone = result.metric, result.config.method, result.reference
    found = result.benefit() if alone else None
    rows = []
    for i, row in enumerate(result.clients):
        cells = [row["client"], str(row["train"])]
        ours = number(metric, row[f"test_{metric}"])
        rows.append([*cells, *(_compared(metric, found.clients[i], ours) if found else [ours])])
    size = f"{mean([row['train'] for row in result.clients]):.0f}"
    foot = [f"{AVERAGES[result.config.average or 'mean']} of {len(rows)}", size]
    ours = number(metric, result.mean())
    if found and alone:
        overall = {**found.overall, "gain": found.overall["mean_gain"], "local": alone.mean(), "verdict": ""}
        foot += _compared(metric, overall, ours)
    else:
        foot.append(ours)
    columns = ["client", "train", *(["local", method, "gain", "95 % interval", "verdict"] if found else [method])]
    where = f"{method} on {result.config.data}, round {result.selected} of {result.rounds[-1]['round']}"
    parts = [inline.table(f"{where}: test {metric_title(metric)}", columns, rows, foot)]
    if found:
        bars = [
            inline.Bar(each["client"], each["gain"], each["low"], each["high"], each["verdict"])
            for each in found.clients
        ]
        parts.append(inline.gain_chart(f"{GAIN}, {metric_title(metric)}", metric, bars))
    return "<div>" + "".join(parts) + "</div>"


def comparison_html(comparison: Comparison) -> str:
    """Return a comparison's table, one row per method, and the chart of their mean gains with every client's."""
    metric, seeds = comparison.metric, comparison.seeds
    several = " ± std" * (len(seeds) > 1)
    columns = ["method", f"mean{several}"]
    columns += [f"gain over local{several}", "95 % interval", "gain", "lose", UNDECIDED] if comparison.benefits else []
    rows, bars = [], []
    for method in comparison.methods:
        cells = [method, _mean_and_std(metric, comparison.means(method))]
        benefit = comparison.benefits.get(method)
        if benefit:
            overall = benefit.overall
            cells += [_mean_and_std(metric, comparison.gains(method), "+"), _interval(metric, overall)]
            cells += [str(len(benefit.who(verdict))) for verdict in ("gains", "loses", UNDECIDED)]
            bars.append(_method_bar(method, benefit))
        rows.append(cells + ["–"] * (len(columns) - len(cells)))
    over = f"{len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    title = f"{len(comparison.clients)} clients, {over}: test {metric_title(metric)}"
    parts = [inline.table(title, columns, rows)]
    if bars:
        parts.append(inline.gain_chart(f"{GAIN}, {metric_title(metric)}: means, and every client", metric, bars))
    parts.append(f"<details><summary>Each client</summary>{_client_table(comparison)}</details>")
    if not comparison.has_local:
        parts.append(f"<p>{NOBODY_ALONE}: add local to the methods.</p>")
    return "<div>" + "".join(parts) + "</div>"


def _client_table(comparison: Comparison) -> str:
    """Return a table with a row per client and a column per method: means over seeds."""
    metric, sizes = comparison.metric, comparison.train_sizes
    values = [comparison.per_client(method) for method in comparison.methods]
    rows = [
        [client, f"{sizes[i]:.0f}", *(number(metric, each[i]) for each in values)]
        for i, client in enumerate(comparison.clients)
    ]
    over = "means over seeds" if len(comparison.seeds) > 1 else f"seed {comparison.seeds[0]}"
    return inline.table(f"Test {metric_title(metric)}, {over}", ["client", "train", *comparison.methods], rows)


def result_figure(result: Result, what: str | None) -> Any:
    """Return one of the report's pictures of a run as a plotly figure; see `Result.plot`."""
    run, made = run_data(result), None
    what = what or ("gain" if result.reference else "rounds")
    if what == "gain":
        made = scores.gains(run)
        if made is None:
            raise CoterieError(f"{NOBODY_ALONE}: run with reference=True, or plot('rounds')")
    elif what == "rounds":
        made = scores.curves(run)
    elif what == "clients":
        alone = run.alone()
        several = {run.method: run.scores()} | ({"local": alone} if alone is not None else {})
        made = scores.spread(several, run.metric, {label: _colour(label, k) for k, label in enumerate(several)})
    else:
        raise CoterieError(f"there is no picture '{what}'; there are {', '.join(CHOICES)}")
    assert made is not None  # `curves` has nothing to draw only where no round was evaluated, and the last always is
    return _plotly(made)


def comparison_figure(comparison: Comparison, what: str | None) -> Any:
    """Return one of the report's pictures of a comparison as a plotly figure; see `Comparison.plot`."""
    metric = comparison.metric
    what = what or ("gain" if comparison.has_local and len(comparison.methods) > 1 else "clients")
    colours = {label: _colour(label, k) for k, label in enumerate(comparison.methods)}
    if what == "gain":
        others = [label for label in comparison.methods if label != "local"]
        if not comparison.has_local or not others:
            raise CoterieError(f"{NOBODY_ALONE}: compare local with other methods, or plot('clients')")
        return _plotly(gain_dots({label: comparison.client_gains(label) for label in others}, metric, colours))
    if what == "clients":
        each = {label: comparison.per_client(label) for label in comparison.methods}
        return _plotly(scores.spread(each, metric, colours))
    raise CoterieError(f"there is no picture '{what}' of a comparison; there are gain, clients")


def run_data(result: Result) -> RunData:
    """Return what a report would read from the folder of this run."""
    return RunData(
        result.path or Path(),
        result.config.to_file(),
        result.clients,
        result.rounds,
        {"selected_round": result.selected},
        result.metric,
        result.benefit().to_json() if result.reference else None,
        reference=run_data(result.reference) if result.reference else None,
    )


def frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a data frame; raise `CoterieError` if pandas is not installed."""
    try:
        import pandas
    except ImportError as error:
        raise CoterieError(f"{NO_PANDAS} (the rows themselves are plain dicts)") from error
    return pandas.DataFrame(list(rows))


def round_rows(result: Result) -> list[dict[str, Any]]:
    """Return one row per evaluated round and client, with every metric of every part as PART_METRIC."""
    rows = []
    for record in result.rounds:
        parts = {part: values for part, values in record.items() if part.endswith(("validation", "test"))}
        for i, name in enumerate(result.names if parts else ()):
            row: dict[str, Any] = {"round": record["round"], "client": name}
            rows.append(row | {f"{part}_{metric}": v[i] for part, by in parts.items() for metric, v in by.items()})
    return rows


def _plotly(picture: Picture) -> Any:
    from plotly.graph_objects import Figure  # takes longer to import than a short run

    made = Figure(picture.figure.data, picture.figure.layout)
    # The report's page gives the heading and the background.
    made.update_layout(title={"text": picture.heading, "x": 0.01, "yref": "container", "y": 0.98, "yanchor": "top"})
    made.update_layout(margin={"t": 84, "l": 20, "r": 20, "b": 20}, paper_bgcolor="white", plot_bgcolor="white")
    return made.update_layout(height=made.layout.height + 84)


def _colour(label: str, k: int) -> str:
    return ALONE if label == "local" else series_colour(k)


def _compared(metric: str, row: Mapping[str, Any], ours: str) -> list[str]:
    cells = [number(metric, row["local"]), ours, number(metric, row["gain"], "+")]
    return [*cells, _interval(metric, row), row["verdict"]]


def _interval(metric: str, row: Mapping[str, Any]) -> str:
    low, high = row.get("low", math.nan), row.get("high", math.nan)
    return "–" if math.isnan(low) else f"[{number(metric, low, '+')}, {number(metric, high, '+')}]"


def _mean_and_std(metric: str, values: NDArray[np.float64], plus: str = "") -> str:
    middle = number(metric, mean(values), plus)
    return f"{middle} ± {number(metric, float(values.std(ddof=1)))}" if len(values) > 1 else middle


def _method_bar(method: str, benefit: Benefit) -> inline.Bar:
    """Return a bar for the mean gain, coloured by its interval, with every client's gain as a dot."""
    low, high = (float(benefit.overall.get(end, math.nan)) for end in ("low", "high"))
    verdict = "gains" if low > 0 else "loses" if high < 0 else UNDECIDED
    dots = [each["gain"] for each in benefit.clients]
    return inline.Bar(method, benefit.overall["mean_gain"], low, high, verdict, dots)
