"""Prints what usual models of tables reach on the same splits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.table import Table

from coterie.evaluation.benefit import sign_of
from coterie.evaluation.metrics import mean
from coterie.experiment.references import NAMES, References
from coterie.experiment.result import Result
from coterie.experiment.several.comparison import Comparison


def references_table(result: Result, found: References) -> Table:
    """Return one row per client and one column per reference."""
    from coterie.cli.tables import format_value, heading, new_table

    metric = result.metric
    title = f"Usual models on the same data: test {heading(metric)}"
    table = new_table(title, "client", *(label.replace(", ", ",\n") for label in NAMES.values()))
    columns = [found.test[name][metric] for name in NAMES]
    for i, client in enumerate(result.names):
        table.add_row(client, *(format_value(metric, values[i]) for values in columns))
    table.add_section()
    means = (format_value(metric, mean(values)) for values in columns)
    table.add_row(f"mean of {len(result.names)}", *means, style="bold")
    return table


def references_sentence(result: Result, found: References) -> str:
    """Say whether the network keeps up with usual models that were trained on as little."""
    alone = result.reference if result.reference is not None else result
    who = "Trained alone, the network" if result.reference is not None else "The network"
    return _compared(who, result.metric, alone.mean(), [found])


def compared_sentence(comparison: Comparison) -> str:
    """Say the same of a comparison's networks, trained alone; empty without them or without references."""
    if not comparison.references or not comparison.has_local:
        return ""
    alone = float(comparison.means("local").mean())
    return _compared("Trained alone, the network", comparison.metric, alone, comparison.references)


def _compared(who: str, metric: str, alone: float, each: Sequence[References]) -> str:
    from coterie.cli.tables import amount, metric_words

    own = {name: mean([one.mean(name, metric) for one in each]) for name in NAMES if name.endswith("own")}
    best = max(own, key=lambda name: sign_of(metric) * own[name])
    lead = sign_of(metric) * (alone - own[best])
    usual = "linear model" if best.startswith("linear") else "trees"
    if not lead < 0:
        return f"{who} is on average no worse than the {usual} on each client's own data."
    less = f"{who} is on average {amount(metric, lead)} worse in {metric_words(metric)}"
    advice = "if that is much, try another --model, --lr or more rounds before judging the federation"
    return f"{less} than the {usual} on each client's own data: {advice}."


def reference_rows(each: Sequence[References], metric: str) -> Iterator[list[str]]:
    """Yield a row for the table of methods for each reference: its name, and its mean over clients and seeds."""
    from coterie.cli.tables import mean_and_std

    for name, label in NAMES.items():
        yield [label, mean_and_std(metric, np.array([one.mean(name, metric) for one in each]))]
