"""What `coterie recommend` says: tables and sentences."""

from __future__ import annotations

import math

from rich.table import Table

from coterie.cli.tables import amount, counts_sentence, format_interval, format_value, heading, metric_words
from coterie.core.units import bytes_in_words
from coterie.experiment.tuning.evidence import LOCAL, Difference
from coterie.experiment.tuning.recommend import Panel
from coterie.experiment.tuning.recommendation import Look, Recommendation
from coterie.methods import METHODS

APART = 2.0  # times what chance gives: from here on, sites are said to differ


def look_lines(look: Look) -> list[str]:
    """Describe the sites."""
    many = f"{look.least} to {look.most} examples each (median {look.median})"
    lines = [
        f"{look.sites} sites with {many if look.least < look.most else f'{look.most} examples each'}, "
        "those for testing not counted."
    ]
    if look.labels is not None:
        away, chance = look.labels
        lines.append(
            f"Labels {_verdict(away, chance)}: to match all sites together, {100 * away:.0f} % of a typical site's "
            f"labels would have to change ({100 * chance:.0f} % by chance)."
        )
    if look.inputs is None:
        return lines
    away, chance = look.inputs
    lines.append(
        f"Inputs {_verdict(away, chance)}: a typical site's mean is {away:.2f} standard deviations from that of all "
        f"({chance:.2f} by chance)."
    )
    return lines


def plan_lines(panel: Panel) -> list[str]:
    """Say what will be tried."""
    one, everything = panel.rounds
    lines = [f"Panel, from cheap to dear: {', '.join(panel.prepared.methods)}."]
    lines += [f"Not tried: {label} ({why})." for label, why in panel.left_out.items()]
    return [
        *lines,
        f"Each method, local included, has {_candidates(panel.trials)} and {one} rounds to be tuned in each of "
        f"{len(panel.folds)} folds; {everything} rounds in all.",
    ]


def _candidates(number: int) -> str:
    return f"{number} candidates" if number > 1 else "1 candidate, its settings as they are,"


def panel_table(found: Recommendation) -> Table:
    """Return one row per method."""
    choice, metric = found.choice, found.metric
    number = len(choice.over_local)
    together = f", {number} intervals together" if number > 1 else ""
    title = f"On held-out examples, {heading(metric)} (95 %{together})"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("method")
    for name in ("mean of sites", "over local", "interval", "sent by and to a site", "minutes"):
        table.add_column(name, justify="right")
    for label, score in choice.scores.items():
        lead = choice.over_local.get(label)
        gain = ["-", "-"] if lead is None else [format_value(metric, lead.mean, "+"), _interval(metric, lead)]
        cost = found.costs[label]
        row = [format_value(metric, score), *gain, bytes_in_words(cost.bytes_a_site), f"{cost.minutes:.2g}"]
        table.add_row(label, *row, style="bold" if label == found.method else None)
    return table


def sentences(found: Recommendation) -> list[str]:
    """Say which method to use, how sure that is, who gains and who loses, and what it costs."""
    return [*_recommended(found), *_who(found), _cost(found)]


def _recommended(found: Recommendation) -> list[str]:
    choice, metric = found.choice, found.metric
    if found.method == LOCAL:
        first = "Recommended: local. Let every site train alone."
        if choice.best == LOCAL:
            return [f"{first} No method of the panel does better on held-out examples."]
        if choice.candidate == LOCAL:
            ahead = choice.over_local[choice.best]
            return [
                f"{first} {_title(choice.best)} is {_by(metric, ahead.mean)} on held-out examples, within a standard "
                f"error (interval {_interval(metric, ahead)}): of methods that are as good, local sends least."
            ]
        lead = choice.over_local[choice.candidate]
        return [
            f"{first} Nothing is known to beat it: {_title(choice.candidate)} comes closest, "
            f"{_by(metric, lead.mean)} on average, but chance may explain that (interval {_interval(metric, lead)})."
        ]
    lead = choice.over_local[found.method]
    lines = [
        f"Recommended: {found.method}. It is {amount(metric, lead.mean)} better than training alone, on average over "
        f"the sites (interval {_interval(metric, lead)}, which holds for all methods of the panel together)."
    ]
    if choice.second and choice.second != LOCAL and choice.over_second is not None:
        lines.append(_over_second(found, choice.over_second))
    return lines


def _over_second(found: Recommendation, lead: Difference) -> str:
    interval = f"95 % interval {_interval(found.metric, lead)}"
    second = found.choice.second
    if lead.clear:
        return f"It is also better than the next best, {second}, by {amount(found.metric, lead.mean)} ({interval})."
    if lead.mean >= 0:
        much = amount(found.metric, lead.mean)
        return f"Over the next best, {second}, it leads by {much}, which may be chance ({interval})."
    higher = f"{second} scores {amount(found.metric, lead.mean)} higher"
    if not found.choice.over_local[second].clear:
        return f"{higher} ({interval}), but is not known to beat training alone."
    return f"{higher}, within a standard error ({interval}): of methods that are as good, {found.method} sends least."


def _who(found: Recommendation) -> list[str]:
    choice = found.choice
    if choice.benefit is None:
        return []
    who = f"With {choice.candidate}: {counts_sentence(choice.benefit)}"
    worse = choice.benefit.fairness["share_worse_than_alone"]
    return [f"{who} {100 * worse:.0f} % of sites scored worse than alone, by chance or not."]


def _cost(found: Recommendation) -> str:
    cost = found.costs[found.method]
    if found.method == LOCAL:
        return f"It sends nothing, and trains for {_minutes(cost.minutes)} on this machine, all sites together."
    return (
        f"A run of {found.settings['rounds']} rounds sends {bytes_in_words(cost.bytes_a_site)} by and to each site, "
        f"and trains for {_minutes(cost.minutes)} on this machine, all sites together."
    )


def _minutes(minutes: float) -> str:
    return f"{60 * minutes:.1f} seconds" if minutes < 1 else f"{minutes:.1f} minutes"


def _interval(metric: str, lead: Difference) -> str:
    return format_interval(metric, {"low": lead.low, "high": lead.high})


def _by(metric: str, gain: float) -> str:
    if math.isnan(gain):
        return f"with an undefined {metric_words(metric)}"
    return f"{amount(metric, gain)} {'better' if gain >= 0 else 'worse'}"


def _title(label: str) -> str:
    return METHODS[label].__name__ if label in METHODS else label


def _verdict(away: float, chance: float) -> str:
    return "differ between sites" if away > APART * chance else "are much alike"
