"""Prints results as tables and sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from coterie.cli.console import say, show
from coterie.cli.references import compared_sentence, reference_rows, references_sentence, references_table
from coterie.cli.take_home import change_sentence, print_take_home
from coterie.evaluation import Benefit
from coterie.evaluation.benefit import UNDECIDED, VERDICTS, sign_of
from coterie.evaluation.fairness import spread
from coterie.evaluation.metrics import AVERAGES, mean
from coterie.experiment.result import Result
from coterie.experiment.several.comparison import Comparison

PERCENT = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "f1")
NOTHING = 1e-12  # a difference below this is rounding
INTERVAL = "95 % interval"
MAX_CLIENTS_NAMED = 8  # in one sentence


def print_result(console: Console, result: Result, *, quiet: bool, bmta: bool) -> None:
    """Print the tables of a run and, unless quiet, the sentences that explain them."""
    show(console, result_table(result))
    if result.references:
        show(console, references_table(result, result.references))
    if result.g_and_p:
        show(console, g_and_p_table(result))
    if not quiet:
        if result.stopped:
            say(console, f"{result.stopped.sentence()}{' The local reference, too.' if result.reference else ''}")
        alone = f" (training alone: round {result.reference.selected})" if result.reference else ""
        by = f"{_average_name(result)} validation {metric_words(result.metric)}"
        last = result.rounds[-1]["round"]
        if result.config.takes_last:
            say(console, f"The last of {last} rounds is taken: choosing one would tell of examples{alone}.")
        else:
            say(console, f"Round {result.selected} of {last} was selected by {by}{alone}.")
        say(console, rounds_sentence(result))
        say(console, fairness_sentence(result))
        say(console, verdict_sentence(result))
        if result.reference:
            say(console, f"{counts_sentence(result.benefit())}\n{significance_sentence(result.benefit())}")
        if result.references:
            say(console, references_sentence(result, result.references))
    print_take_home(console, result, quiet=quiet)
    if result.budget and not quiet:
        say(console, f"{result.budget.sentence()}")
    if result.onboarded:
        show(console, onboarded_table(result.onboarded))
    if bmta:
        optimistic = "the best mean test accuracy of any round. It is chosen on test data and therefore optimistic"
        say(console, f"BMTA {100 * result.bmta():.1f} %: {optimistic}.")
    if not quiet and result.path:
        say(console, f"Written to {result.path}")


def result_table(result: Result) -> Table:
    """Return one row per client, and the averages."""
    metric, alone = result.metric, result.reference
    columns = ["local", result.config.method, "gain", INTERVAL, "verdict"] if alone else [result.config.method]
    table = new_table(f"Test {heading(metric)}", "client", "train", *columns)

    def beside(local: float, ours: float, row: Mapping[str, Any]) -> list[str]:
        if not alone:
            return [format_value(metric, ours)]
        words = [format_value(metric, local), format_value(metric, ours), format_value(metric, row["gain"], "+")]
        return [*words, format_interval(metric, row), row.get("verdict", "")]

    for row in result.clients:
        values = beside(row.get(f"local_test_{metric}", math.nan), row[f"test_{metric}"], row)
        table.add_row(row["client"], str(row["train"]), *values)
    table.add_section()
    size = mean([row["train"] for row in result.clients])
    overall = result.benefit().overall if alone else {}
    values = beside(alone.mean() if alone else 0.0, result.mean(), {**overall, "gain": overall.get("mean_gain")})
    table.add_row(f"{_average_name(result)} of {len(result.clients)}", f"{size:.0f}", *values, style="bold")
    return table


def _average_name(result: Result) -> str:
    return AVERAGES[result.config.average or "mean"]


def g_and_p_table(result: Result) -> Table:
    """Return pFedBreD's table: both models on all test examples and on each client's own, for both rounds."""
    table = new_table(f"G and P, test {heading(result.metric)}", "model", "round", "global test", "local test")
    for when in ("selected", "last"):
        found = result.g_and_p[when]
        for which, name in (("G", "G (the global model)"), ("P", "P (the clients' own)")):
            both = (format_value(result.metric, found[which][test][result.metric]) for test in ("global", "local"))
            table.add_row(name, f"{when}, {found['round']}", *both)
    return table


def rounds_sentence(result: Result) -> str:
    """Give the means of the selected and the last round, unweighted and weighted by test examples."""
    named = {f"selected round {result.selected}": "test", f"last round {result.rounds[-1]['round']}": "last_test"}
    parts = []
    for name, split in named.items():
        alike, by_size = (
            format_value(result.metric, result.mean(split=split, weighted=each)) for each in (False, True)
        )
        parts.append(f"{name}: {alike} (weighted by test size: {by_size})")
    return f"{_average_name(result).capitalize()} test {heading(result.metric)}, {', '.join(parts)}."


def fairness_sentence(result: Result) -> str:
    """Say how evenly the metric is spread over clients, compared with training alone."""
    sizes = np.array([row["test"] for row in result.clients], dtype=float)
    spreads = []
    for each in (result, result.reference):
        if each is not None:
            values = np.array([row[f"test_{result.metric}"] for row in each.clients])
            spreads.append(_spread_sentence(result.metric, spread(values, sizes, result.metric)))
    worse = ""
    if result.reference:
        share = result.benefit().fairness["share_worse_than_alone"]
        worse = f" (alone: {spreads[1]}); {100 * share:.0f} % of clients are worse than alone"
    return f"Over clients: {spreads[0]}{worse}."


def _spread_sentence(metric: str, found: Mapping[str, float]) -> str:
    worst = format_value(metric, found["worst_decile"])
    return f"std {format_value(metric, found['std'])}, coefficient of variation {found['cv']:.3f}, worst tenth {worst}"


def counts_sentence(benefit: Benefit) -> str:
    """Say who gains, who loses, and how many are undecided."""
    parts = []
    for verdict, one, many in (("gains", "gains", "gain"), ("loses", "loses", "lose")):
        names = benefit.who(verdict)
        listed = f" ({_list_names(names)})" if names else ""
        parts.append(f"{len(names)} {one if len(names) == 1 else many}{listed}")
    count = f"Of {len(benefit.clients)} client{'s' * (len(benefit.clients) != 1)}"
    undecided = f"{len(benefit.who(UNDECIDED))} {UNDECIDED}"
    return f"{count}, {', '.join(parts)}, {undecided} ({100 * benefit.level:.0f} % intervals)."


def _list_names(names: Sequence[str]) -> str:
    more = len(names) - MAX_CLIENTS_NAMED
    return ", ".join(names[:MAX_CLIENTS_NAMED]) + (f" and {more} more" if more > 0 else "")


def significance_sentence(benefit: Benefit) -> str:
    """Report Wilcoxon's test over clients, and say if there are too few of them."""
    found = benefit.overall["wilcoxon"]
    if not found["n"]:
        return "No client differs from training alone, so Wilcoxon's test does not apply."
    few = " (with fewer than six clients that differ, p cannot reach 0.05)" if found["n"] < 6 else ""
    numbers = f"p = {format_p(found['p'])}, effect size {found['effect']:+.2f}"
    return f"Wilcoxon signed-rank test over clients: {numbers}{few}."


def verdict_sentence(result: Result) -> str:
    """Say in one or two sentences whether the federation helped."""
    if result.config.method == "local":
        return "This is training alone, the baseline for other methods."
    if result.reference is None:
        return (
            "No client was trained alone for comparison, so this run cannot show whether federation helps. "
            "Run it again without --no-reference."
        )
    gains, name = result.gains(), type(result.method).__name__
    better, worse, average = int((gains > 0).sum()), int((gains < 0).sum()), mean(gains)
    counted = f"better than training alone for {better} of {len(gains)} clients and worse for {worse}"
    if math.isnan(average):
        return f"{name} cannot be compared: {metric_words(result.metric)} is undefined on every client's test examples."
    if average > 0:
        return f"{name} is {counted}, and {amount(result.metric, average)} better on average."
    how = f"it is {amount(result.metric, average)} worse" if average < 0 else "it makes no difference"
    return f"{name} does not help on average: {how}. It is {counted}."


def onboarded_table(joined: Sequence[Result]) -> Table:
    """Return one row per newcomer, and their mean."""
    metric, method, alone = joined[0].metric, joined[0].config.method, joined[0].reference is not None
    title = f"Onboarded after training: test {heading(metric)}"
    columns = ["local", method, "gain", INTERVAL, "verdict"] if alone else [method]
    table = new_table(title, "client", "train", *columns)
    rows = [result.clients[0] for result in joined]
    keys = (f"local_test_{metric}", f"test_{metric}", "gain") if alone else (f"test_{metric}",)
    means = {key: mean([row[key] for row in rows]) for key in keys}

    def cells(values: Mapping[str, Any]) -> list[str]:
        return [format_value(metric, values[key], "+" if key == "gain" else "") for key in keys]

    for row in rows:
        benefit = [format_interval(metric, row), row["verdict"]] if alone else []
        table.add_row(row["client"], str(row["train"]), *cells(row), *benefit)
    if len(rows) > 1:
        table.add_section()
        size = f"{mean([row['train'] for row in rows]):.0f}"
        table.add_row(f"mean of {len(rows)}", size, *cells(means), style="bold")
    return table


def onboarded_sentence(result: Result) -> str:
    """Say in a sentence or two what a newcomer gains."""
    row, name = result.clients[0], type(result.method).__name__
    if result.reference is None:
        return f"{row['client']} was trained on its own data only, as {name} always does."
    if math.isnan(row["gain"]):
        name = metric_words(result.metric)
        return f"{row['client']} cannot be compared: {name} is undefined on its test examples."
    much = amount(result.metric, row["gain"])
    better = f"{much} better than training alone" if row["gain"] > 0 else f"{much} worse than training alone"
    if not row["gain"]:
        return f"{row['client']}'s model from {name} is as good as training alone, on its {row['test']} test examples."
    sure = {
        "gains": "which is more than chance would explain",
        "loses": "which is more than chance would explain: it should train alone",
    }.get(row["verdict"], f"but its {row['test']} test examples are too few to rule out chance")
    return f"{row['client']}'s model from {name} is {better}, {sure}."


def print_comparison(console: Console, comparison: Comparison, *, quiet: bool) -> None:
    """Print the tables of a comparison and, unless quiet, the sentences that explain them."""
    show(console, client_table(comparison))
    show(console, method_table(comparison))
    if comparison.benefits:
        show(console, gain_table(comparison))
    if not quiet:
        say(console, best_sentence(comparison))
        for method, benefit in comparison.benefits.items():
            say(console, f"{method}: {counts_sentence(benefit)}")
            if method in comparison.taken:
                say(console, f"{method}: {change_sentence(comparison.metric, benefit, comparison.taken[method])}")
        if usual := compared_sentence(comparison):
            say(console, usual)
        if not comparison.has_local:
            say(console, "No client was trained alone, so gains are unknown: add local to --methods.")
        if comparison.path:
            say(console, f"Written to {comparison.path}")


def client_table(comparison: Comparison) -> Table:
    """Return one row per client and one column per method, with means over seeds."""
    table = new_table(_title(comparison), "client", "train", *comparison.methods)
    sizes, columns = comparison.train_sizes, [comparison.per_client(method) for method in comparison.methods]
    for i, client in enumerate(comparison.clients):
        values = [format_value(comparison.metric, float(column[i])) for column in columns]
        table.add_row(client, f"{sizes[i]:.0f}", *values)
    return table


def method_table(comparison: Comparison) -> Table:
    """Return one row per method: means over clients (± std over seeds), unweighted and weighted, and their spread."""
    over_seeds = " ± std" * (len(comparison.seeds) > 1)
    columns = (f"mean{over_seeds}", f"by test size{over_seeds}", "std of clients", "variation", "worst tenth")
    table = new_table(_title(comparison), "method", *columns)
    metric = comparison.metric
    for method in comparison.methods:
        even = comparison.fairness(method)
        row = [
            mean_and_std(metric, comparison.means(method)),
            mean_and_std(metric, comparison.weighted_means(method)),
        ]
        row += [format_value(metric, even["std"]), f"{even['cv']:.3f}", format_value(metric, even["worst_decile"])]
        table.add_row(method, *row)
    if comparison.references:
        table.add_section()
        for usual in reference_rows(comparison.references, metric):
            table.add_row(*usual)
    return table


def gain_table(comparison: Comparison) -> Table:
    """Return one row per method except local: what its clients gain over training alone."""
    columns = ("gain over local", INTERVAL, "gain", "lose", "undecided", "worse", "p", "effect")
    title = f"Gain over training alone, {heading(comparison.metric)}; Wilcoxon's p and effect size over clients"
    table = new_table(title, "method", *columns)
    several = {method: (benefit, comparison.gains(method)) for method, benefit in comparison.benefits.items()}
    for method, benefit in comparison.taken.items():
        several[f"{method}, taken home"] = benefit, comparison.kept_gains(method)
    for method, (benefit, gains) in several.items():
        overall, test = benefit.overall, benefit.overall["wilcoxon"]
        row = [mean_and_std(comparison.metric, gains, "+"), format_interval(comparison.metric, overall)]
        row += [str(overall[key]) for key in VERDICTS]
        row += [f"{100 * benefit.fairness['share_worse_than_alone']:.0f} %"]
        table.add_row(method, *row, format_p(test["p"]), f"{test['effect']:+.2f}")
    return table


def best_sentence(comparison: Comparison) -> str:
    """Say which method is best, by how much, and with how many seeds."""
    best = comparison.best()
    rest = [method for method in comparison.methods if method != best]
    if not rest:
        return f"Only {best} was run, so there is nothing to compare it with."
    second = comparison.best(rest)
    lead = sign_of(comparison.metric) * (comparison.means(best) - comparison.means(second))
    if not lead.mean() > 0:
        return f"{best} and {second} are equally good on average."
    ahead = f"{amount(comparison.metric, float(lead.mean()))} ahead of {second}"
    steadily = f", and better than {second} with {int((lead > 0).sum())} of {len(lead)} seeds" if len(lead) > 1 else ""
    return f"{best} is best on average, {ahead}{steadily}."


def metric_words(metric: str) -> str:
    """Return the name of a metric as text."""
    return "AUROC" if metric == "auroc" else metric.replace("_", " ")


def heading(metric: str) -> str:
    """Return the name of a metric with its unit."""
    return f"{metric_words(metric)} (%)" if metric in PERCENT else metric_words(metric)


def format_value(metric: str, value: float, sign: str = "") -> str:
    """Format a value of a metric, with a sign if `sign` is "+"; NaN is "-"."""
    if math.isnan(value):
        return "-"
    value = 0.0 if abs(value) < NOTHING else value
    text = f"{100 * value:{sign}.1f}" if metric in PERCENT else f"{value:{sign}.4g}"
    return text if float(text) else text.lstrip("+-")  # zero has no sign


def format_interval(metric: str, row: Mapping[str, Any]) -> str:
    """Format an interval as '[-0.4, +2.1]', or as '-' if it is undefined."""
    if math.isnan(row.get("low", math.nan)):
        return "-"
    return f"[{format_value(metric, row['low'], '+')}, {format_value(metric, row['high'], '+')}]"


def format_p(p: float) -> str:
    """Format a p-value."""
    return f"{p:.2g}" if p >= 0.0001 else "< 0.0001"


def amount(metric: str, difference: float) -> str:
    """Format the size of a difference: '0.4 points', 'less than 0.1 points', '0.0312 (rmse)'."""
    size = abs(difference)
    if metric not in PERCENT:
        return f"{size:.3g} ({metric_words(metric)})"
    return f"{100 * size:.1f} points" if size >= 0.0005 else "less than 0.1 points"


def mean_and_std(metric: str, values: NDArray[np.float64], sign: str = "") -> str:
    """Format the mean over seeds and, if there are several, the standard deviation."""
    middle = format_value(metric, mean(values), sign)
    return f"{middle} ± {format_value(metric, float(values.std(ddof=1)))}" if len(values) > 1 else middle


def _title(comparison: Comparison) -> str:
    seeds = len(comparison.seeds)
    over = f"{seeds} seeds" if seeds > 1 else f"seed {comparison.seeds[0]}"
    return f"Test {heading(comparison.metric)}, {over}"


def new_table(title: str, first: str, *columns: str) -> Table:
    """Return an empty table; all columns but the first are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first)
    for name in columns:
        table.add_column(name, justify="right")
    return table
