"""Makes the page that compares several runs: methods over seeds on the same data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from coterie.core.units import bytes_in_words
from coterie.report import collaboration, cost, scores
from coterie.report.block import Note, Page, Picture, Section, Table
from coterie.report.group import Groups, check, grouped, with_local
from coterie.report.read import Array, RunData, mean
from coterie.report.single import data as data_of
from coterie.report.single import flatten_settings
from coterie.report.style import (
    ALONE,
    figure,
    is_percent,
    metric_title,
    metric_words,
    name_axis,
    number,
    scale,
    series_colour,
    short_label,
    sign,
    unit,
)
from coterie.report.verdict import method_title
from coterie.storage.run_folder import safe_name


def stops(runs: list[RunData]) -> list[Note]:
    """Return a note on the runs that ended before their planned rounds."""
    found = [(run, run.summary["stopped"]) for run in runs if run.summary.get("stopped")]
    if not found:
        return []
    each = [f"{run.method} seed {run.seed} after round {stopped['round']}" for run, stopped in found]
    words = f"Runs stopped before their {found[0][1]['planned']} planned rounds: {', '.join(each)}."
    if any(run.method == "local" for run, _ in found) and len({run.method for run in runs}) > 1:
        words += " Training alone has as many rounds as the longest of the others with its seed."
    return [Note(f"{words} The others took all of them." if len(found) < len(runs) else words)]


def page(runs: list[RunData]) -> Page:
    """Make the page; raise `CoterieError` if the runs cannot be compared."""
    check(runs)
    runs = with_local(runs)
    groups, metric = grouped(runs), runs[0].metric
    colours = {label: ALONE if label == "local" else series_colour(k) for k, label in enumerate(groups)}
    per_client = {label: _over_seeds(group, metric) for label, group in groups.items()}
    seeds = sorted({run.seed for run in runs})
    together: list[Any] = []
    with_matrix = [(label, group[0]) for label, group in groups.items() if collaboration.weights(group[0]) is not None]
    for k, (label, run) in enumerate(with_matrix):
        found = collaboration.pictures(run, 1 / len(with_matrix), f"rounds-{k}")
        together += [_renamed(picture, label, run.seed) for picture in found[:2]]
    sections: list[tuple[str, list[Any]]] = [
        ("Methods", [method_table(groups, metric), gains(groups, metric, colours)]),
        (
            "Clients",
            [scores.spread(per_client, metric, colours), by_client(per_client, metric, runs[0].names, colours)],
        ),
        ("Learning", [mean_curves(groups, metric, colours)]),
        ("Collaboration", together),
        ("Data", [*data_of(runs[0])]),
        ("Cost", [cost.compared(groups, colours)]),
        ("Configuration", [*stops(runs), *settings(groups)]),
    ]
    kept = [Section(name, [block for block in blocks if block is not None]) for name, blocks in sections]
    which = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    where = f"{len(runs[0].names)} clients, model {runs[0].config.get('model')}, {which}"
    return Page(
        f"{len(groups)} methods on {runs[0].config.get('data')}" if len(groups) > 1 else f"{next(iter(groups))}",
        where,
        verdict(groups, metric),
        tiles(groups, metric),
        [section for section in kept if section.blocks],
    )


def method_table(groups: Groups, metric: str) -> Table:
    """Return one row per method."""
    columns = ["method", "seeds", f"test {metric_title(metric)}"]
    compared = any(_gains(group, metric) is not None for group in groups.values())
    columns += ["gain over local", "clients that gain"] if compared else []
    columns += ["worst client", "spread of clients", "sent"]
    rows: list[list[Any]] = []
    for label, group in groups.items():
        means = np.array([mean(run.scores(metric)) for run in group])
        clients = _over_seeds(group, metric)
        row: list[Any] = [label, (str(len(group)), len(group)), (_mean_and_std(metric, means), float(means.mean()))]
        if compared:
            found = _gains(group, metric)
            if found is None:
                row += [("–", None), ("–", None)]
            else:
                better = int((np.nanmean(found, 0) > 0).sum())
                values = np.array([mean(each) for each in found])
                row += [(_mean_and_std(metric, values, "+"), float(values.mean()))]
                row += [(f"{better} of {found.shape[1]}", better)]
        worst = float(np.nanmin(clients)) if sign(metric) > 0 else float(np.nanmax(clients))
        row += [(number(metric, worst), worst), (number(metric, float(np.nanstd(clients))), float(np.nanstd(clients)))]
        total = float(np.mean([cost.sent(run) for run in group]))
        rows.append([*row, (bytes_in_words(total), total)])
    caption = (
        "Means over clients, ± the standard deviation over seeds. Worst client and spread refer to means over seeds."
    )
    return Table("methods", "Methods", columns, rows, caption)


def gains(groups: Groups, metric: str, colours: Mapping[str, str]) -> Picture | Note:
    """Draw each client's gain, with one line of dots per method."""
    found = {label: _gains(group, metric) for label, group in groups.items()}
    known = {label: np.nanmean(values, 0) for label, values in found.items() if values is not None}
    if not known:
        return Note(
            "No client was trained alone for comparison, so there are no gains to show: "
            "add a run of method local on the same data, or run them with --reference."
        )
    return gain_dots(known, metric, colours)


def gain_dots(known: Mapping[str, Array], metric: str, colours: Mapping[str, str]) -> Picture:
    """Draw each client's gain, [clients], as a dot, with one line per method."""
    made = scores.spread(known, metric, colours).figure
    made.add_vline(x=0, line={"color": ALONE, "width": 1.5, "dash": "dash"})
    made.update_xaxes(title={"text": f"gain ({'points of ' * is_percent(metric)}{metric_words(metric)})"})
    caption = (
        "Every dot is a client's gain, averaged over seeds. Left of the dashed line, a client is better off alone."
    )
    return Picture("gain", "Gain over training alone", caption, made)


def by_client(per_client: dict[str, Array], metric: str, names: list[str], colours: Mapping[str, str]) -> Picture:
    """Draw one row per client with one dot per method."""
    first = next(iter(per_client.values()))
    order = np.argsort(-np.nan_to_num(first), kind="stable")
    made = figure(height=int(np.clip(22 * len(names) + 100, 200, 1400)), showlegend=True)
    for k, (label, values) in enumerate(per_client.items()):
        made.add(
            "scatter",
            x=scale(metric) * values[order],
            y=np.arange(len(names)),
            mode="markers",
            name=short_label(label),
            marker={"color": colours[label], "size": 9, "symbol": ("circle", "diamond", "square", "cross", "x")[k % 5]},
            text=[short_label(names[i]) for i in order],
            hovertemplate=f"%{{text}}, {short_label(label)}: %{{x:.4g}}<extra></extra>",
        )
    name_axis(made.layout["yaxis"], [names[i] for i in order], 60)
    made.update_yaxes(range=[len(names) - 0.4, -0.6])
    made.update_xaxes(title={"text": f"test {metric_title(metric)}"})
    caption = "One line per client and one mark per method: what each client would get from another method."
    return Picture("by-client", "Client by client", caption, made)


def mean_curves(groups: Groups, metric: str, colours: Mapping[str, str]) -> Picture:
    made = figure(height=380, showlegend=True)
    for label, group in groups.items():
        found = [run.curve(metric) for run in group]
        shortest = min(len(at) for at, _ in found)
        values = np.array([[mean(row) for row in curve[:shortest]] for _, curve in found])
        made.add(
            "scatter",
            x=found[0][0][:shortest],
            y=scale(metric) * values.mean(0),
            mode="lines" if shortest > 1 else "markers",
            line={"color": colours[label], "width": 2.2, "dash": "dash" if label == "local" else "solid"},
            name=short_label(label),
            hovertemplate=f"{short_label(label)}, round %{{x}}: %{{y:.4g}}<extra></extra>",
        )
    made.update_xaxes(title={"text": "round"}, showgrid=False)
    made.update_yaxes(title={"text": f"test {metric_title(metric)}"})
    caption = "Mean over clients and seeds, round by round."
    return Picture("curves", "Round by round", caption, made)


def settings(groups: Groups) -> list[Table]:
    """Return the settings that the methods have in common, and those that differ."""
    all_ = {label: flatten_settings(group[0].config) for label, group in groups.items()}
    keys = list(dict.fromkeys(key for values in all_.values() for key in values if key not in ("seed", "method")))
    same = [key for key in keys if len({str(values.get(key)) for values in all_.values()}) == 1]
    common = [[key, str(next(iter(all_.values())).get(key))] for key in same]
    other = [[key, *(str(values.get(key, "–")) for values in all_.values())] for key in keys if key not in same]
    made = [Table("common", "In common", ["setting", "value"], common)] if common else []
    return made + ([Table("different", "Different", ["setting", *all_], other)] if other else [])


def tiles(groups: Groups, metric: str) -> list[tuple[str, str, str]]:
    """Return the key figures at the top of the page."""
    best = _best(groups, metric)
    percent = " %" if is_percent(metric) else ""
    means = np.array([mean(run.scores(metric)) for run in groups[best]])
    made = [
        (
            "best on average",
            method_title(best).removeprefix("training ").capitalize() if best == "local" else method_title(best),
            f"{_mean_and_std(metric, means)}{percent}",
        )
    ]
    found = _gains(groups[best], metric)
    if found is not None:
        better = int((np.nanmean(found, 0) > 0).sum())
        made.append(("its mean gain", f"{number(metric, float(np.nanmean(found)), '+')}{unit(metric)}", "over local"))
        made.append(("clients that gain", f"{better} of {found.shape[1]}", f"with {best}"))
    seeds = max(len(group) for group in groups.values())
    made.append(("compared", f"{len(groups)} methods", f"{seeds} seed{'s' * (seeds > 1)}"))
    return made


def verdict(groups: Groups, metric: str) -> str:
    """Say in two sentences which method is best and whether it helps."""
    best = _best(groups, metric)
    name, rest = method_title(best), {label: group for label, group in groups.items() if label != best}
    if not rest:
        return f"Only {name} is here, so there is nothing to compare it with. {_gain_sentence(groups, best, metric)}"
    second = _best(rest, metric)
    lead = sign(metric) * (_mean(groups[best], metric) - _mean(groups[second], metric))
    ahead = f"{number(metric, lead)}{unit(metric)} ahead of {method_title(second)} in mean test {metric_words(metric)}"
    if not lead > 0:
        ahead = f"level with {method_title(second)} in mean test {metric_words(metric)}"
    return f"{name[0].upper()}{name[1:]} is best on average, {ahead}. {_gain_sentence(groups, best, metric)}"


def _gain_sentence(groups: Groups, best: str, metric: str) -> str:
    if best == "local":
        return "On average no method beats training alone: clients are better off alone."
    found = _gains(groups[best], metric)
    if found is None:
        return "No client was trained alone for comparison, so it is unknown whether federation helps."
    better = int((np.nanmean(found, 0) > 0).sum())
    return f"With it, {better} of {found.shape[1]} clients do better than alone, averaged over seeds."


def _gains(group: list[RunData], metric: str) -> Array | None:
    """Return gains over training alone with the same seed, [seeds, clients]; None if they are unknown."""
    found = [run.gains(metric) for run in group]
    return None if any(each is None for each in found) else np.array(found)


def _renamed(picture: Picture, label: str, seed: int) -> Picture:
    heading = f"{picture.heading}: {label}, seed {seed}"
    return dataclasses.replace(picture, name=f"{picture.name}-{safe_name(label)}", heading=heading)


def _over_seeds(group: list[RunData], metric: str) -> Array:
    values: Array = np.nanmean(np.array([run.scores(metric) for run in group]), 0)
    return values


def _mean(group: list[RunData], metric: str) -> float:
    return float(np.mean([mean(run.scores(metric)) for run in group]))


def _best(groups: Groups, metric: str) -> str:
    return max(groups, key=lambda label: sign(metric) * _mean(groups[label], metric))


def _mean_and_std(metric: str, values: Array, plus: str = "") -> str:
    mean_text = number(metric, float(values.mean()), plus)
    return f"{mean_text} ± {number(metric, float(values.std(ddof=1)))}" if len(values) > 1 else mean_text
