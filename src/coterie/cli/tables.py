"""Results in words and tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from coterie.cli.console import say, show
from coterie.evaluation import BETTER
from coterie.experiment.comparison import Comparison
from coterie.experiment.result import Result

PERCENT = ("accuracy", "balanced_accuracy")


def print_result(console: Console, result: Result, *, quiet: bool, bmta: bool) -> None:
    show(console, result_table(result))
    if not quiet:
        alone = f" (training alone: round {result.reference.selected})" if result.reference else ""
        by = f"mean validation {words_of(result.metric)}"
        say(console, f"Round {result.selected} of {result.config.rounds} was selected by {by}{alone}.")
        say(console, verdict(result))
    if result.onboarded:
        show(console, onboarded_table(result.onboarded))
    if bmta:
        optimistic = "the best mean test accuracy of any round; it is chosen on test data, so it is optimistic"
        say(console, f"BMTA {100 * result.bmta():.1f} %: {optimistic}.")
    if not quiet and result.path:
        say(console, f"Written to {result.path}")


def result_table(result: Result) -> Table:
    """One line a client, and the averages."""
    metric, alone = result.metric, result.reference
    columns = ["local", result.config.method, "gain"] if alone else [result.config.method]
    table = _table(f"Test {heading(metric)}", "client", "train", *columns)

    def add(name: str, size: float, ours: float, local: float, gain: float, style: str = "") -> None:
        beside = [shown(metric, local), shown(metric, ours), shown(metric, gain, "+")]
        table.add_row(name, f"{size:.0f}", *(beside if alone else beside[1:2]), style=style)

    for row in result.clients:
        local, gain = row.get(f"local_test_{metric}", 0.0), row.get("gain", 0.0)
        add(row["client"], row["train"], row[f"test_{metric}"], local, gain)
    table.add_section()
    size = float(np.mean([row["train"] for row in result.clients]))
    local, gain = (alone.mean(), float(result.gains().mean())) if alone else (0.0, 0.0)
    add(f"mean of {len(result.clients)}", size, result.mean(), local, gain, "bold")
    return table


def verdict(result: Result) -> str:
    """Did the federation help? In one or two sentences, whichever way it went."""
    if result.config.method == "local":
        return "This is training alone, which other methods are compared with."
    if result.reference is None:
        return "No client was trained alone for comparison, so this run cannot say whether federation helps."
    gains, name = result.gains(), type(result.method).__name__
    better, worse, mean = int((gains > 0).sum()), int((gains < 0).sum()), float(gains.mean())
    counted = f"better than training alone for {better} of {len(gains)} clients and worse for {worse}"
    if mean > 0:
        return f"{name} is {counted}, and {amount(result.metric, mean)} better on average."
    how = f"it is {amount(result.metric, mean)} worse" if mean < 0 else "it makes no difference"
    return f"{name} does not help on average: {how}. It is {counted}."


def onboarded_table(joined: Sequence[Result]) -> Table:
    """One line a newcomer, and their mean; intervals are of its test examples."""
    metric, method = joined[0].metric, joined[0].config.method
    title = f"Onboarded, without having taken part: test {heading(metric)}"
    columns = ["local", method, "gain", "95 % interval", "verdict"] if joined[0].reference else [method]
    table = _table(title, "client", "train", *columns)
    for result in joined:
        row = result.clients[0]
        ours = shown(metric, row[f"test_{metric}"])
        cells = [ours]
        if result.reference:
            between = f"{shown(metric, row['low'], '+')} to {shown(metric, row['high'], '+')}"
            local, gain = shown(metric, row[f"local_test_{metric}"]), shown(metric, row["gain"], "+")
            cells = [local, ours, gain, between, row["verdict"]]
        table.add_row(row["client"], str(row["train"]), *cells)
    if len(joined) > 1 and joined[0].reference:
        rows = [result.clients[0] for result in joined]
        mean = {key: float(np.mean([row[key] for row in rows])) for key in (f"local_test_{metric}", f"test_{metric}")}
        more = shown(metric, float(np.mean([row["gain"] for row in rows])), "+")
        means = [*(shown(metric, value) for value in mean.values()), more, "", ""]
        table.add_section()
        table.add_row(f"mean of {len(rows)}", f"{np.mean([r['train'] for r in rows]):.0f}", *means, style="bold")
    return table


def onboarded_words(result: Result) -> str:
    """What a newcomer has of it, in a sentence or two."""
    row, name = result.clients[0], type(result.method).__name__
    if result.reference is None:
        return f"{row['client']} was trained on its own data alone: that is all that {name} does."
    much = amount(result.metric, row["gain"])
    better = f"{much} better than training alone" if row["gain"] > 0 else f"{much} worse than training alone"
    if not row["gain"]:
        return f"{row['client']}'s model from {name} is as good as training alone, on its {row['test']} test examples."
    sure = {
        "gains": "which is more than chance",
        "loses": "which is more than chance: it should train alone",
    }.get(row["verdict"], f"but its {row['test']} test examples cannot tell that from chance")
    return f"{row['client']}'s model from {name} is {better}, {sure}."


def print_comparison(console: Console, comparison: Comparison, *, quiet: bool) -> None:
    show(console, client_table(comparison))
    show(console, method_table(comparison))
    if not quiet:
        say(console, compared(comparison))
        if comparison.path:
            say(console, f"Written to {comparison.path}")


def client_table(comparison: Comparison) -> Table:
    """One line a client, one column a method; means over seeds."""
    table = _table(_title(comparison), "client", "train", *comparison.methods)
    sizes, columns = comparison.train_sizes, [comparison.per_client(method) for method in comparison.methods]
    for i, client in enumerate(comparison.clients):
        values = [shown(comparison.metric, float(column[i])) for column in columns]
        table.add_row(client, f"{sizes[i]:.0f}", *values)
    return table


def method_table(comparison: Comparison) -> Table:
    """One line a method: mean +- std over seeds of the mean over clients and, if there is local, the gain over it."""
    beside = ("gain over local", "clients that gain") if comparison.has_local else ()
    spread = "mean ± std" if len(comparison.seeds) > 1 else "mean"
    table = _table(_title(comparison), "method", spread, *beside)
    for method in comparison.methods:
        row = [method, _spread(comparison.metric, comparison.means(method))]
        if comparison.has_local and method != "local":
            better = int((comparison.client_gains(method) > 0).sum())
            row += [_spread(comparison.metric, comparison.gains(method), "+")]
            row += [f"{better} of {len(comparison.clients)}"]
        table.add_row(*row)
    return table


def compared(comparison: Comparison) -> str:
    """Which is best, by how much, and how steadily."""
    best = comparison.best()
    rest = [method for method in comparison.methods if method != best]
    if not rest:
        return f"Only {best} was run: there is nothing to compare it with."
    second = comparison.best(rest)
    sign = 1 if BETTER[comparison.metric] is max else -1
    lead = sign * (comparison.means(best) - comparison.means(second))
    if not lead.mean() > 0:
        return f"{best} and {second} are equally good on average."
    ahead = f"{amount(comparison.metric, float(lead.mean()))} ahead of {second}"
    steadily = f", and better than it with {int((lead > 0).sum())} of {len(lead)} seeds" if len(lead) > 1 else ""
    return f"{best} is best on average, {ahead}{steadily}."


def words_of(metric: str) -> str:
    return metric.replace("_", " ")


def heading(metric: str) -> str:
    return f"{words_of(metric)} (%)" if metric in PERCENT else words_of(metric)


def shown(metric: str, value: float, sign: str = "") -> str:
    text = f"{100 * value:{sign}.1f}" if metric in PERCENT else f"{value:{sign}.4g}"
    return text if float(text) else text.lstrip("+-")  # zero has no sign


def amount(metric: str, difference: float) -> str:
    """How large a difference is: '0.4 points', 'less than 0.1 points', '0.0312 (rmse)'."""
    size = abs(difference)
    if metric not in PERCENT:
        return f"{size:.3g} ({words_of(metric)})"
    return f"{100 * size:.1f} points" if size >= 0.0005 else "less than 0.1 points"


def _spread(metric: str, values: NDArray[np.float64], sign: str = "") -> str:
    mean = shown(metric, float(values.mean()), sign)
    return f"{mean} ± {shown(metric, float(values.std(ddof=1)))}" if len(values) > 1 else mean


def _title(comparison: Comparison) -> str:
    seeds = len(comparison.seeds)
    over = f"{seeds} seeds" if seeds > 1 else f"seed {comparison.seeds[0]}"
    return f"Test {heading(comparison.metric)}, {over}"


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first)
    for name in columns:
        table.add_column(name, justify="right")
    return table
