"""Makes the page of one run."""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.core.units import bytes_in_words
from coterie.report import collaboration, cost, embedding, references, scores, taken
from coterie.report.block import Note, Page, Picture, Section, Table
from coterie.report.distribution import bubbles, sizes
from coterie.report.read import RunData, mean
from coterie.report.style import ALONE, OURS, is_percent, metric_title, metric_words, number, unit
from coterie.report.verdict import method_title, verdict

CONFIGURATION = "Configuration"  # the heading of the last section
NO_REFERENCE = (
    "No client was trained alone for comparison, so there are no gains to show: run it again with --reference, or add "
    "a run of method local on the same data to this report."
)
NO_MATRIX = "This method treats all clients alike, so there is no figure of who learns from whom."
NO_FEATURES = (
    "This run has no features to show: the deployed models have no linear last layer, or there are too few test "
    "examples."
)


def page(run: RunData) -> Page:
    """Make the page."""
    benefit: list[Any] = [scores.gains(run), client_table(run), references.table(run), fairness(run)]
    if run.gains() is None and run.method != "local":
        benefit.insert(0, Note(NO_REFERENCE))
    spread = {"local": run.alone(), run.method: run.scores()}
    known = {label: values for label, values in spread.items() if values is not None}
    progress: list[Any] = [scores.curves(run), scores.spread(known, run.metric, {run.method: OURS, "local": ALONE})]
    features: list[Any] = [*embedding.pictures(run)] or [Note(NO_FEATURES)]
    together: list[Any] = [*collaboration.pictures(run)] or [Note(NO_MATRIX)]
    sections = [
        ("What each client gains", benefit),
        ("What each client takes home", taken.blocks(run)),
        ("Learning", progress),
        ("Collaboration", together if run.method != "local" else []),
        ("Features", features),
        ("Data", data(run)),
        ("Privacy", [privacy_table(run)]),
        ("Cost", [*cost.pictures(run)]),
        (CONFIGURATION, configuration(run)),
    ]
    kept = [Section(name, [block for block in blocks if block is not None]) for name, blocks in sections]
    where = f"{run.config.get('data')}, {len(run.names)} clients, model {run.config.get('model')}, seed {run.seed}"
    return Page(
        f"{method_title(run.method)} on {run.config.get('data')}",
        where,
        verdict(run),
        tiles(run),
        [section for section in kept if section.blocks],
    )


def tiles(run: RunData) -> list[tuple[str, str, str]]:
    """Return the key figures at the top of the page."""
    percent = " %" if is_percent(run.metric) else ""
    alone, gains, ours = run.alone(), run.gains(), run.scores()
    made = [
        (
            f"{run.average_name} test {metric_words(run.metric)}",
            f"{number(run.metric, run.average(ours))}{percent}",
            f"alone {number(run.metric, run.average(alone))}{percent}"
            if alone is not None and gains is not None
            else "",
        )
    ]
    if gains is not None:
        over = (run.benefit or {}).get("overall", {})
        low, high = over.get("low"), over.get("high")
        ends = f"{number(run.metric, low, '+')} to {number(run.metric, high, '+')}" if low is not None else ""
        made.append(
            (f"{run.average_name} gain", f"{number(run.metric, run.average(gains), '+')}{unit(run.metric)}", ends)
        )
        better, worse = int((gains > 0).sum()), int((gains < 0).sum())
        if over:
            better, worse = over["gains"], over["loses"]
        rest = len(gains) - better - worse
        beside = f"{worse} lose{'' if worse != 1 else 's'}, {rest} {'undecided' if over else 'unchanged'}"
        made.append(("clients that gain", f"{better} of {len(gains)}", beside))
    stopped = run.summary.get("stopped")
    beside = f"stopped early, of {stopped['planned']} planned rounds" if stopped else "by validation data"
    made.append(("selected round", f"{run.selected} of {run.last_round}", beside))
    made.append(("sent", bytes_in_words(cost.sent(run)), f"in {cost.duration(cost.seconds(run))}"))
    return made


def client_table(run: RunData) -> Table:
    """Return one row per client, with gains and verdicts if the run has them."""
    alone, gains, ours = run.alone(), run.gains(), run.scores()
    metric = run.metric
    columns = ["client", "train", "test"]
    compared = alone is not None and gains is not None
    columns += ["alone", run.method, "gain"] if compared else [run.method]
    benefit = {row["client"]: row for row in run.benefit["clients"]} if run.benefit and compared else {}
    if benefit:
        columns += ["interval", "verdict"]
    rows: list[list[Any]] = []
    for i, row in enumerate(run.clients):
        cells: list[Any] = [str(row["client"])]
        cells += [(f"{row.get(key, float('nan')):.0f}", row.get(key)) for key in ("train", "test")]
        values = [(number(metric, ours[i]), ours[i])]
        if alone is not None and gains is not None:
            gain = number(metric, gains[i], "+")
            values = [(number(metric, alone[i]), alone[i]), *values, (gain, gains[i])]
        cells += values
        if benefit:
            found = benefit[str(row["client"])]
            low, high = (float("nan") if found[end] is None else float(found[end]) for end in ("low", "high"))
            cells += [(f"{number(metric, low, '+')} to {number(metric, high, '+')}", low), found["verdict"]]
        rows.append(cells)
    total = [
        f"{run.average_name} of {len(rows)}",
        f"{mean(run.column('train')):.0f}",
        f"{mean(run.column('test')):.0f}",
    ]
    if alone is not None and gains is not None:
        total += [
            number(metric, run.average(alone)),
            number(metric, run.average(ours)),
            number(metric, run.average(gains), "+"),
        ]
    else:
        total += [number(metric, run.average(ours))]
    total += [""] * (len(columns) - len(total))
    caption = f"Test {metric_title(metric)} at the selected round; click a heading to sort."
    return Table("clients", "Every client", columns, rows, caption, [total])


def fairness(run: RunData) -> Table | None:
    """Return how evenly the result is spread over clients, or None if the run does not say."""
    found = (run.benefit or {}).get("fairness")
    if not found or run.method == "local":
        return None
    metric = run.metric
    names = {
        "mean": "mean, unweighted",
        "weighted_mean": "mean, weighted by size",
        "std": "standard deviation over clients",
        "cv": "coefficient of variation",
        "worst_decile": "worst tenth of clients",
    }
    rows = []
    for key, words_ in names.items():
        pair = [found.get(side, {}).get(key) for side in ("federated", "local")]
        shown = ["–" if v is None else f"{v:.3f}" if key == "cv" else number(metric, v) for v in pair]
        rows.append([words_, *zip(shown, pair, strict=True)])
    share = found.get("share_worse_than_alone")
    foot = [] if share is None else [["clients worse than alone", f"{100 * share:.0f} %", "–"]]
    caption = f"How evenly the result is spread over clients, in test {metric_title(metric)}."
    return Table("fairness", "Fairness", ["over clients", run.method, "alone"], rows, caption, foot)


def privacy_table(run: RunData) -> Table | None:
    """Return what differential privacy costs every client; None if the run has none."""
    found = run.summary.get("privacy")
    if not found:
        return None
    rows = [[name, "infinite" if cost is None else f"{cost:.2f}"] for name, cost in found["epsilons"].items()]
    worst = "infinite" if found["epsilon"] is None else f"{found['epsilon']:.2f}"
    caption = (
        f"Epsilon at delta {found['delta']:g}, by {found['level']} privacy with noise {found['noise']:.3g} times the "
        f"clip of {found['clip']:g}; the worst is {worst}. It protects {found['protects']}; neighbours have "
        f"{found['adjacency']}. The numbers in this report are measured without noise: they are not protected."
    )
    return Table("privacy", "Differential privacy", ["client", "epsilon"], rows, caption)


def data(run: RunData) -> list[Picture | Table | Note]:
    """Draw which classes, or how many examples, each client has."""
    facts = run.data or {}
    parts = ("train", "validation", "test")
    counts = facts.get("counts")
    if counts and facts.get("classes"):
        total = np.sum([np.array(counts[part], dtype=float) for part in parts if part in counts], axis=0)
        caption = "The area of a bubble is the number of examples that a client has of a class, over all splits."
        made = bubbles(total, run.names, [str(name) for name in facts["classes"]])
        return [Picture("data", "Who has what", caption, made)]
    total = np.nansum([run.column(part) for part in parts], axis=0)
    caption = "The number of examples of each client, over all splits."
    return [Picture("data", "Who has how much", caption, sizes(total, run.names))]


def configuration(run: RunData) -> list[Picture | Table | Note]:
    """Return the settings of the run, and the versions and machine it ran with."""
    rows = [[key, _shown(value)] for key, value in flatten_settings(run.config).items()]
    made: list[Picture | Table | Note] = [Table("configuration", "Settings", ["setting", "value"], rows)]
    if stopped := run.summary.get("stopped"):
        where = f"after round {stopped['round']} of {stopped['planned']} by {stopped['by']}"
        also = " Training alone ended after as many rounds." if run.reference is not None else ""
        made.insert(0, Note(f"This run stopped {where}: {stopped['why']}.{also}"))
    versions = run.environment.get("packages", {})
    engine = run.engine.get("engine", {})
    about = [[f"engine {key}", _shown(value)] for key, value in engine.items()]
    about += [["python", str(run.environment.get("python", ""))]] if run.environment else []
    about += [[name, str(version)] for name, version in versions.items()]
    about += [["machine", f"{run.environment.get('platform', '')}, {run.environment.get('cores', '?')} cores"]]
    if len(about) > 1:
        made.append(Table("environment", "Environment", ["item", "value"], about))
    return made


def flatten_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Flatten tables of settings to keys such as 'hyper.sigma2'."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            found |= {f"{key}.{name}": each for name, each in value.items()}
        else:
            found[key] = value
    return found


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 200 else f"{text[:199]}…"
