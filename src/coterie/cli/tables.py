"""Results in words and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from coterie.cli.console import say, show
from coterie.evaluation import Benefit
from coterie.evaluation.benefit import sign_of
from coterie.evaluation.fairness import spread
from coterie.evaluation.metrics import mean
from coterie.experiment.comparison import Comparison
from coterie.experiment.result import Result

PERCENT = ("accuracy", "balanced_accuracy", "macro_f1")
INTERVAL = "95 % interval"
NAMED = 8  # clients that a sentence names


def print_result(console: Console, result: Result, *, quiet: bool, bmta: bool) -> None:
    show(console, result_table(result))
    if result.g_and_p:
        show(console, g_and_p_table(result))
    if not quiet:
        alone = f" (training alone: round {result.reference.selected})" if result.reference else ""
        by = f"mean validation {words_of(result.metric)}"
        say(console, f"Round {result.selected} of {result.config.rounds} was selected by {by}{alone}.")
        say(console, both_rounds(result))
        say(console, evenness(result))
        say(console, verdict(result))
        if result.reference:
            say(console, f"{who(result.benefit())}\n{tested(result.benefit())}")
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
    columns = ["local", result.config.method, "gain", INTERVAL, "verdict"] if alone else [result.config.method]
    table = _table(f"Test {heading(metric)}", "client", "train", *columns)

    def beside(local: float, ours: float, row: Mapping[str, Any]) -> list[str]:
        if not alone:
            return [shown(metric, ours)]
        words = [shown(metric, local), shown(metric, ours), shown(metric, row["gain"], "+")]
        return [*words, interval(metric, row), row.get("verdict", "")]

    for row in result.clients:
        values = beside(row.get(f"local_test_{metric}", math.nan), row[f"test_{metric}"], row)
        table.add_row(row["client"], str(row["train"]), *values)
    table.add_section()
    size = mean([row["train"] for row in result.clients])
    overall = result.benefit().overall if alone else {}
    values = beside(alone.mean() if alone else 0.0, result.mean(), {**overall, "gain": overall.get("mean_gain")})
    table.add_row(f"mean of {len(result.clients)}", f"{size:.0f}", *values, style="bold")
    return table


def g_and_p_table(result: Result) -> Table:
    """pFedBreD's protocol: both models, tested on everybody's examples and on each client's own, at both rounds."""
    table = _table(f"G and P, test {heading(result.metric)}", "model", "round", "global test", "local test")
    for when in ("selected", "last"):
        found = result.g_and_p[when]
        for which, name in (("G", "G (the global model)"), ("P", "P (the clients' own)")):
            both = (shown(result.metric, found[which][test][result.metric]) for test in ("global", "local"))
            table.add_row(name, f"{when}, {found['round']}", *both)
    return table


def both_rounds(result: Result) -> str:
    """The selected round and the last, each client counting alike and by its examples."""
    named = {f"selected round {result.selected}": "test", f"last round {result.rounds[-1]['round']}": "last_test"}
    told = []
    for name, split in named.items():
        alike, by_size = (shown(result.metric, result.mean(split=split, weighted=each)) for each in (False, True))
        told.append(f"{name}: {alike} (by test size {by_size})")
    return f"Mean test {heading(result.metric)}, {', '.join(told)}."


def evenness(result: Result) -> str:
    """How evenly the metric is spread over clients, beside training alone."""
    sizes = np.array([row["test"] for row in result.clients], dtype=float)
    told = []
    for each in (result, result.reference):
        if each is not None:
            values = np.array([row[f"test_{result.metric}"] for row in each.clients])
            told.append(_spread_words(result.metric, spread(values, sizes, result.metric)))
    worse = ""
    if result.reference:
        share = result.benefit().fairness["share_worse_than_alone"]
        worse = f" (alone: {told[1]}); {100 * share:.0f} % of clients are worse than alone"
    return f"Over clients: {told[0]}{worse}."


def _spread_words(metric: str, found: Mapping[str, float]) -> str:
    worst = shown(metric, found["worst_decile"])
    return f"std {shown(metric, found['std'])}, coefficient of variation {found['cv']:.3f}, worst tenth {worst}"


def who(benefit: Benefit) -> str:
    """Who gains, who loses, who cannot tell, in words."""
    told = []
    for verdict, one, many in (("gains", "gains", "gain"), ("loses", "loses", "lose")):
        names = benefit.who(verdict)
        listed = f" ({', '.join(names[:NAMED])}{f' and {len(names) - NAMED} more' * (len(names) > NAMED)})"
        told.append(f"{len(names)} {one if len(names) == 1 else many}{listed * bool(names)}")
    verb = "cannot tell"
    count = f"Of {len(benefit.clients)} client{'s' * (len(benefit.clients) != 1)}"
    return f"{count}, {told[0]}, {told[1]}, {len(benefit.who(verb))} {verb} ({100 * benefit.level:.0f} % intervals)."


def tested(benefit: Benefit) -> str:
    """Wilcoxon's test over clients, and whether there are enough of them for it."""
    found = benefit.overall["wilcoxon"]
    if not found["n"]:
        return "No client differs from training alone, so there is nothing to test over clients."
    few = " (fewer than six that differ cannot reach 0.05)" if found["n"] < 6 else ""
    told = f"p = {p_value(found['p'])}, effect size {found['effect']:+.2f}"
    return f"Wilcoxon signed-rank test over clients: {told}{few}."


def verdict(result: Result) -> str:
    """Did the federation help? In one or two sentences, whichever way it went."""
    if result.config.method == "local":
        return "This is training alone, which other methods are compared with."
    if result.reference is None:
        return (
            "No client was trained alone for comparison, so this run cannot say whether federation helps: "
            "run it again without --no-reference."
        )
    gains, name = result.gains(), type(result.method).__name__
    better, worse, average = int((gains > 0).sum()), int((gains < 0).sum()), mean(gains)
    counted = f"better than training alone for {better} of {len(gains)} clients and worse for {worse}"
    if math.isnan(average):
        return f"{name} cannot be compared: no client's test examples define {words_of(result.metric)}."
    if average > 0:
        return f"{name} is {counted}, and {amount(result.metric, average)} better on average."
    how = f"it is {amount(result.metric, average)} worse" if average < 0 else "it makes no difference"
    return f"{name} does not help on average: {how}. It is {counted}."


def onboarded_table(joined: Sequence[Result]) -> Table:
    """One line a newcomer, and their mean."""
    metric, method, alone = joined[0].metric, joined[0].config.method, joined[0].reference is not None
    title = f"Onboarded, without having taken part: test {heading(metric)}"
    columns = ["local", method, "gain", INTERVAL, "verdict"] if alone else [method]
    table = _table(title, "client", "train", *columns)
    rows = [result.clients[0] for result in joined]
    keys = (f"local_test_{metric}", f"test_{metric}", "gain") if alone else (f"test_{metric}",)
    means = {key: mean([row[key] for row in rows]) for key in keys}

    def cells(values: Mapping[str, Any]) -> list[str]:
        return [shown(metric, values[key], "+" if key == "gain" else "") for key in keys]

    for row in rows:
        told = [interval(metric, row), row["verdict"]] if alone else []
        table.add_row(row["client"], str(row["train"]), *cells(row), *told)
    if len(rows) > 1:
        table.add_section()
        size = f"{mean([row['train'] for row in rows]):.0f}"
        table.add_row(f"mean of {len(rows)}", size, *cells(means), style="bold")
    return table


def onboarded_words(result: Result) -> str:
    """What a newcomer has of it, in a sentence or two."""
    row, name = result.clients[0], type(result.method).__name__
    if result.reference is None:
        return f"{row['client']} was trained on its own data alone: that is all that {name} does."
    if math.isnan(row["gain"]):
        return f"{row['client']}'s test examples have no {words_of(result.metric)}, so it cannot be compared."
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
    if comparison.benefits:
        show(console, gain_table(comparison))
    if not quiet:
        say(console, compared(comparison))
        for method, benefit in comparison.benefits.items():
            say(console, f"{method}: {who(benefit)}")
        if not comparison.has_local:
            say(console, "Nobody was trained alone, so nobody can say who gains: add local to --methods.")
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
    """One line a method: the mean over clients, +- std over seeds, alike and by size; the spread over clients."""
    over_seeds = " ± std" * (len(comparison.seeds) > 1)
    columns = (f"mean{over_seeds}", f"by test size{over_seeds}", "std of clients", "variation", "worst tenth")
    table = _table(_title(comparison), "method", *columns)
    metric = comparison.metric
    for method in comparison.methods:
        even = comparison.fairness(method)
        row = [_spread(metric, comparison.means(method)), _spread(metric, comparison.weighted_means(method))]
        row += [shown(metric, even["std"]), f"{even['cv']:.3f}", shown(metric, even["worst_decile"])]
        table.add_row(method, *row)
    return table


def gain_table(comparison: Comparison) -> Table:
    """One line a method but for local: what its clients gain over training alone."""
    columns = ("gain over local", INTERVAL, "gain", "lose", "cannot tell", "worse", "p", "effect")
    title = f"Gain over training alone, {heading(comparison.metric)}; Wilcoxon's p and effect size over clients"
    table = _table(title, "method", *columns)
    for method, benefit in comparison.benefits.items():
        overall, test = benefit.overall, benefit.overall["wilcoxon"]
        row = [_spread(comparison.metric, comparison.gains(method), "+"), interval(comparison.metric, overall)]
        row += [str(overall[key]) for key in ("gains", "loses", "cannot_tell")]
        row += [f"{100 * benefit.fairness['share_worse_than_alone']:.0f} %"]
        table.add_row(method, *row, p_value(test["p"]), f"{test['effect']:+.2f}")
    return table


def compared(comparison: Comparison) -> str:
    """Which is best, by how much, and how steadily."""
    best = comparison.best()
    rest = [method for method in comparison.methods if method != best]
    if not rest:
        return f"Only {best} was run: there is nothing to compare it with."
    second = comparison.best(rest)
    lead = sign_of(comparison.metric) * (comparison.means(best) - comparison.means(second))
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
    if math.isnan(value):
        return "-"
    text = f"{100 * value:{sign}.1f}" if metric in PERCENT else f"{value:{sign}.4g}"
    return text if float(text) else text.lstrip("+-")  # zero has no sign


def interval(metric: str, row: Mapping[str, Any]) -> str:
    """'[-0.4, +2.1]'; nothing where it is not defined."""
    if math.isnan(row.get("low", math.nan)):
        return "-"
    return f"[{shown(metric, row['low'], '+')}, {shown(metric, row['high'], '+')}]"


def p_value(p: float) -> str:
    return f"{p:.2g}" if p >= 0.0001 else "< 0.0001"


def amount(metric: str, difference: float) -> str:
    """How large a difference is: '0.4 points', 'less than 0.1 points', '0.0312 (rmse)'."""
    size = abs(difference)
    if metric not in PERCENT:
        return f"{size:.3g} ({words_of(metric)})"
    return f"{100 * size:.1f} points" if size >= 0.0005 else "less than 0.1 points"


def _spread(metric: str, values: NDArray[np.float64], sign: str = "") -> str:
    middle = shown(metric, mean(values), sign)
    return f"{middle} ± {shown(metric, float(values.std(ddof=1)))}" if len(values) > 1 else middle


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
