"""Shows what usual models of tables reach on the same splits, beside the run's own."""

from __future__ import annotations

from typing import Any

from coterie.report.block import Table
from coterie.report.read import RunData, mean, numbers
from coterie.report.style import metric_title, number


def table(run: RunData) -> Table | None:
    """Return one row per client and one column per reference; None if the run has no references."""
    if run.references is None:
        return None
    metric, alone = run.metric, run.alone()
    names, test = run.references["names"], run.references["test"]
    columns = {label: numbers(test[key][metric]) for key, label in names.items()}
    if alone is not None:
        columns["network, alone"] = alone
    columns[f"network, {run.method}"] = run.scores()
    rows: list[list[Any]] = []
    for i, name in enumerate(run.names):
        rows.append([name, *((number(metric, values[i]), float(values[i])) for values in columns.values())])
    total = [f"mean of {len(rows)}", *(number(metric, mean(values)) for values in columns.values())]
    caption = (
        f"Test {metric_title(metric)} of scikit-learn's logistic or ridge regression and gradient-boosted trees, "
        "trained on each client's own data and on all clients' data in one place, with the same splits. If a network "
        "trained alone is far below those on own data, the network is to blame, and not the federation."
    )
    return Table("references", "Usual models on the same data", ["client", *columns], rows, caption, [total])
