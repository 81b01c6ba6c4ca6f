"""Write a model card as Markdown, for people who would use the model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np

from coterie.data.federation import SplitName
from coterie.evaluation.adoption import FEDERATED
from coterie.evaluation.benefit import LEVEL
from coterie.experiment.take_home import adopt

PARTS: tuple[SplitName, ...] = ("train", "validation", "test")
SHOWN_COLLABORATORS = 10  # how many card.md names


def to_markdown(card: dict[str, Any], run: Path) -> str:
    """Return the card as Markdown, for people who would use the model."""
    lines = [f"# Model card: {card['client']}", "", _what(card), "", "## Is it better than training alone?", ""]
    lines += [
        *_kept(card),
        _worth(card),
        "",
        "## Data",
        "",
        *_data_table(card),
        "",
        "## Metrics",
        "",
        *_metric_table(card),
        "",
    ]
    lines += ["## Who it learned from", "", *_learned(card), "", "## How to use it", "", *_use(card, run), ""]
    if card.get("privacy"):
        lines += ["## Privacy", "", card["privacy"]["words"], ""]
    lines += ["## How it was made", "", *_made(card)]
    return "\n".join(lines) + "\n"


def _what(card: dict[str, Any]) -> str:
    schedule, name = card["schedule"], card["client"]
    if card["took_part"]:
        who = f"{name}, one of {card['clients']} clients that trained together, without sharing data"
    else:
        who = f"{name}, which joined {card['clients']} clients that had trained together before"
    rounds = schedule.get("stopped_after", schedule["rounds"])
    chosen = f"Round {schedule['selected_round']} of {rounds} was chosen by {_words(schedule['selected_by'])}"
    return f"This is the model of {who}. The method: {card['method']['paper']} {chosen}; test data had no part in that."


def _kept(card: dict[str, Any]) -> list[str]:
    """Say what the client chose to take home, if it could choose."""
    taken = card.get("take_home")
    if not taken:
        return []
    lines = [f"It takes home {adopt.words(taken)}."]
    before = taken["federated_benefit"]
    if before and taken["kept"] != FEDERATED:
        gain = _with_interval(before["gain"], before["low"], before["high"], "+")
        lines[-1] += f" The federated model's own gain would have been {gain}."
    if taken["temperature"] is not None:
        lines.append(f"Its outputs are divided by {taken['temperature']:.3f}, fitted on its validation data.")
    if taken["threshold"] is not None:
        lines.append(
            f"It predicts the second class above {taken['threshold']:.3f}, a threshold chosen on its validation data."
        )
    return [" ".join(lines), ""]


def _worth(card: dict[str, Any]) -> str:
    metric, gain = card["selected_metric"], card["benefit"]
    measured = _with_interval(card["metrics"]["test"][metric], *card["metrics"]["test_intervals"][metric])
    test = f"On the {card['data']['test']} test examples that it never saw, its {_words(metric)} is {measured}."
    if gain is None:
        return f"{test} There is nothing to compare it with: no model was trained alone beside it."
    verdict = {
        "gains": "So it is better than training alone.",
        "loses": "So it is worse than training alone: a model trained on the client's own data is the better choice.",
    }.get(gain["verdict"], "The test examples do not show which of the two is better.")
    difference = _with_interval(gain["gain"], gain["low"], gain["high"], "+")
    alone = f"Training alone for as many steps gives {_shown(gain['local'])}: the gain is {difference}."
    return f"{test} {alone} {verdict}"


def _data_table(card: dict[str, Any]) -> list[str]:
    data = card["data"]
    lines = [f"From `{data['name']}`.", "", "| | training | validation | test |", "|---|---:|---:|---:|"]
    lines.append(f"| examples | {' | '.join(str(data[part]) for part in PARTS)} |")
    lines += [
        f"| class {_cell(name)} | {' | '.join(str(c[p]) for p in PARTS)} |"
        for name, c in data.get("classes", {}).items()
    ]
    unseen = [name for name, count in data.get("classes", {}).items() if not count["train"]]
    if unseen:
        lines += ["", f"It had no training examples of its own of: {', '.join(unseen)}."]
    return lines


def _metric_table(card: dict[str, Any]) -> list[str]:
    metrics = card["metrics"]
    lines = [f"| | validation | test | {LEVEL:.0%} interval |", "|---|---:|---:|---:|"]
    for name, value in metrics["test"].items():
        between = " to ".join(map(_shown, metrics["test_intervals"].get(name, ())))
        lines.append(f"| {_words(name)} | {_shown(metrics['validation'].get(name))} | {_shown(value)} | {between} |")
    return [
        *lines,
        "",
        "Intervals come from resampling the test examples 1,000 times with replacement; few examples, wide intervals.",
    ]


def _learned(card: dict[str, Any]) -> list[str]:
    learned = card["learned_from"]
    lines = [f"It learned from {learned['words']}."]
    weights = list(learned.get("weights", {}).items())
    if weights:
        lines += ["", "| client | weight |", "|---|---:|"]
        lines += [
            f"| {_cell(name)}{' (itself)' * (name == card['client'])} | {weight:.3f} |"
            for name, weight in weights[:SHOWN_COLLABORATORS]
        ]
    if len(weights) > SHOWN_COLLABORATORS:
        number = len(weights) - SHOWN_COLLABORATORS + learned.get("more", 0)
        has = f"the first {len(weights)}" if "more" in learned else "them all"
        lines += ["", f"{number} more have smaller weights; `card.json` has {has}."]
    return lines


def _use(card: dict[str, Any], run: Path) -> list[str]:
    name = shlex.quote(card["client"])
    name = name if "'" in name else f"'{name}'"
    lines = [
        f"    coterie predict {run} --client {name} rows.csv -o out.csv",
        f"    coterie export {run} --client {name} --format onnx",
        "",
        f"or in Python `coterie.load('{run}', {card['client']!r})`, a PyTorch module that takes inputs of shape (rows, "
        f"{', '.join(map(str, card['input_shape']))}), prepared as in training, and gives {card['outputs']}",
    ]
    if card["outputs"] != "values":
        softmax = "their softmax are the probabilities, which `coterie predict` writes"
        lines[-1] += f" ({softmax if card['outputs'] == 'logits' else '`coterie predict` writes what they mean'})"
    lines[-1] += ". It was measured on data of this client only; elsewhere, measure it again."
    if card["holds"]:
        lines += [
            "",
            f"The file of this model holds {card['holds']}: keep it, and what is exported of it, with the data.",
        ]
    return lines


def _made(card: dict[str, Any]) -> list[str]:
    method, optimizer, versions = card["method"], dict(card["optimizer"]), card["versions"]
    values = {"model": card["model"], **card["schedule"]}
    values |= {"optimizer": optimizer.pop("name", "the method's own"), **optimizer, **method["hyper"]}
    values |= card.get("training", {})
    lines = ["| setting | value |", "|---|---|", f"| method | {method['name']} |"]
    lines += [f"| {key} | {_cell(str(value))} |" for key, value in values.items()]
    return [*lines, "", f"Made with {', '.join(f'{name} {version}' for name, version in versions.items())}."]


def _words(metric: str) -> str:
    return metric.replace("_", " ")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _with_interval(value: float, low: float, high: float, sign: str = "") -> str:
    if value is None or not np.isfinite(value):
        return "not defined"
    return f"{_shown(value, sign)} ({LEVEL:.0%} interval {_shown(low, sign)} to {_shown(high, sign)})"


def _shown(value: float | None, sign: str = "") -> str:
    return "not defined" if value is None or not np.isfinite(value) else f"{value:{sign}.3f}"
