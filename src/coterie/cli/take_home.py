"""Prints what the clients take home, if they choose."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from coterie.cli.console import say, show
from coterie.evaluation import Benefit
from coterie.evaluation.adoption import AVERAGE, FEDERATED, LOCAL, MIN_EXAMPLES
from coterie.evaluation.metrics import mean
from coterie.experiment.result import Result
from coterie.experiment.take_home.adopt import Adoption

WORDS = {FEDERATED: "federated", AVERAGE: "average of both", LOCAL: "its local model"}


def print_take_home(console: Console, result: Result, *, quiet: bool) -> None:
    """Print the table of choices and, unless quiet, what they change."""
    found = result.take_home
    if found is None:
        return
    show(console, take_home_table(result, found))
    if quiet:
        return
    if result.config.take_home == "best":
        say(console, choices_sentence(found))
        if found.before and found.benefit:
            say(console, change_sentence(result.metric, found.before, found.benefit))
    for line in (calibration_sentence(result, found), threshold_sentence(result, found)):
        if line:
            say(console, line)


def take_home_table(result: Result, found: Adoption) -> Table:
    """Return one row per client: what it keeps, and what that gains."""
    from coterie.cli.tables import INTERVAL, format_interval, format_value, heading, new_table

    metric, benefit = result.metric, found.benefit
    columns = ["validation", "takes home", "test"]
    columns += ["temperature"] * any(each is not None for each in found.temperatures)
    columns += ["threshold"] * any(each is not None for each in found.thresholds)
    columns += ["gain", INTERVAL, "verdict"] if benefit else []
    table = new_table(f"What each client takes home: test {heading(metric)}", "client", *columns)

    def gain(row: Mapping[str, Any]) -> list[str]:
        return [format_value(metric, row["gain"], "+"), format_interval(metric, row), row.get("verdict", "")]

    for i, (name, choice) in enumerate(zip(found.names, found.choices, strict=True)):
        row = [
            f"{choice.examples}{' in folds' * choice.held_out}",
            WORDS[choice.kept],
            format_value(metric, found.test[metric][i]),
        ]
        row += [f"{each:.2f}" for each in (found.temperatures[i], found.thresholds[i]) if each is not None]
        table.add_row(name, *row, *(gain(benefit.clients[i]) if benefit else []))
    table.add_section()
    number = f"{mean([float(choice.examples) for choice in found.choices]):.0f}"
    row = [number, "", format_value(metric, mean(found.test[metric]))]
    row += [""] * (len(columns) - len(row) - 3 * (benefit is not None))
    row += gain({**benefit.overall, "gain": benefit.overall["mean_gain"]}) if benefit else []
    table.add_row(f"mean of {len(found.names)}", *row, style="bold")
    return table


def choices_sentence(found: Adoption) -> str:
    """Say how many clients keep what."""
    kept = f"{found.count(FEDERATED)} keep the federated model, {found.count(AVERAGE)} the average with their local one"
    few = found.with_few_examples()
    why = f" ({few} of them with fewer than {MIN_EXAMPLES} validation examples: see --validation)" if few else ""
    held = sum(choice.held_out for choice in found.choices)
    by = (
        f"By their own validation data ({held} of them by cross-validation)" if held else "By their own validation data"
    )
    return f"{by}, {kept}, {found.count(LOCAL)} their local one{why}."


def change_sentence(metric: str, before: Benefit, after: Benefit) -> str:
    """Say how the choices change who gains and who loses."""
    from coterie.cli.tables import format_value

    def told(found: Benefit) -> str:
        gain = format_value(metric, found.overall["mean_gain"], "+")
        return f"{found.overall['gains']} gain, {found.overall['loses']} lose, mean gain {gain}"

    return f"As federated: {told(before)}. As taken home: {told(after)}."


def calibration_sentence(result: Result, found: Adoption) -> str:
    """Say what calibration did to the log-loss; empty without it."""
    known = [each for each in found.temperatures if each is not None]
    if not known:
        return ""
    span = f"{min(known):.2f} to {max(known):.2f}"
    losses = f"mean test log-loss {mean(found.test['loss']):.4g}, calibration error {mean(found.test['ece']):.4g}"
    return f"Calibrated on validation data by temperatures from {span}: {losses}."


def threshold_sentence(result: Result, found: Adoption) -> str:
    """Say what the clients' own thresholds did; empty without them."""
    metric = result.config.threshold
    if metric is None:
        return ""
    if not found.at_threshold:
        return "No threshold was chosen: that needs two classes."
    usual, own = (100 * mean(by[metric]) for by in (found.test, found.at_threshold))
    if math.isnan(own):
        return ""
    words = f"mean test {metric.replace('_', ' ')} is {own:.1f} % ({usual:.1f} % at 0.5)"
    return f"With thresholds chosen on validation data, {words}."
