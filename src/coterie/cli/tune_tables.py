"""What `coterie tune` and `coterie compare --tune` print about a search."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from coterie.cli.tables import format_value as format_metric
from coterie.cli.tables import heading
from coterie.experiment.tuning.search import MethodSearch
from coterie.experiment.tuning.space import in_words
from coterie.experiment.tuning.tune import Searches, Tuning

CLEAR = 0.4  # a rank correlation from which on a direction is named


def plan_lines(searches: Searches) -> list[str]:
    """Say what is searched and what it costs, before it begins."""
    lines = []
    for label, search in searches.methods.items():
        ranges = ", ".join(f"{name} {each}" for name, each in search.space.items())
        lines.append(f"{label}: {ranges or 'nothing to search'}")
    return [*lines, budget_sentence(searches)]


def budget_sentence(searches: Searches) -> str:
    """Say how many rounds each method gets."""
    rungs = next(iter(searches.methods.values())).rungs
    steps = ", ".join(f"{rung.candidates} until round {rung.rounds}" for rung in rungs)
    full = rungs[0].candidates * rungs[-1].rounds
    saved = "" if full == searches.budget else f" instead of {full}"
    return (
        f"Each method, local included, has {rungs[0].candidates} candidates ({steps}): {searches.budget} rounds{saved}."
    )


def chosen_table(tuning: Tuning) -> Table:
    """Return one row per method: what was chosen and what it scores on validation data."""
    metric = tuning.metric
    table = Table(title=f"Chosen on validation data, {heading(metric)}", title_justify="left", title_style="bold")
    table.add_column("method", no_wrap=True)
    for name in ("as it was", "chosen"):
        table.add_column(name, justify="right")
    table.add_column("settings")
    for name in ("best round", "candidates", "rounds", "seconds"):
        table.add_column(name, justify="right")
    for label, search in tuning.searches.methods.items():
        table.add_row(label, *_row(search, metric), style="bold" if label == tuning.best else None)
    return table


def _row(search: MethodSearch, metric: str) -> Sequence[str]:
    chosen, first = search.chosen, search.candidates[0]
    best, start = search.best(chosen), search.best(first)
    before = "-" if start is None else format_metric(metric, start.value)
    if first.rungs < len(search.rungs) and start is not None:
        before += f" (round {search.rungs[first.rungs - 1].rounds})"
    seconds = sum(each.seconds for each in search.candidates)
    return (
        before,
        format_metric(metric, search.score),
        in_words(chosen.values),
        "-" if best is None else str(best.round),
        str(len(search.candidates)),
        str(search.rounds),
        f"{seconds:.1f}",
    )


def importance_lines(tuning: Tuning) -> list[str]:
    """Say of each method what mattered."""
    return [line for search in tuning.searches.methods.values() if (line := importance_sentence(search))]


def importance_sentence(search: MethodSearch) -> str:
    """Say what share of the scores' variation each setting explains, and which way it goes."""
    found = search.importance()
    if len(search.candidates) < 4 or not found:
        return ""
    parts = []
    for name, share in sorted(found.items(), key=lambda each: -each[1]):
        way = search.direction(name)
        words = (
            "" if math.isnan(way) or abs(way) < CLEAR else ", larger is better" if way > 0 else ", smaller is better"
        )
        parts.append(f"{name} {100 * share:.0f} %{words}")
    diverged = sum(bool(each.diverged) for each in search.candidates)
    lost = f" {diverged} of {len(search.candidates)} candidates diverged." if diverged else ""
    return f"{search.label}, what mattered after round {search.rungs[0].rounds}: {'; '.join(parts)}.{lost}"
