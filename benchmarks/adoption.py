"""Does `--take-home best` keep sites from harm, and what does that cost in gain?

    python benchmarks/adoption.py --federations 200 --first 1000 --out adoption.json    # 15 minutes on one core
    python benchmarks/adoption.py --table adoption.json    # the tables of docs/adoption.md

Every federation has ten sites with 40 to 800 patients (log-uniform), a tenth or a fifth of them for validation, and
2,000 more for testing. Labels are drawn from p(y = 1 | x) = sigmoid(w_i x + b_i) with x ~ N(0, I_20). A site's w_i is
the shared w plus t_i times a direction of its own, and b_i ~ N(0, 1); t_i is 0 (sites that can gain) or 0.5 to 2.5
(sites that FedAvg harms), and how many are of the second kind varies from federation to federation. Half the
federations train softmax regression, half the network `mlp`, longer.

For each site, the rules below choose between the federated model, the local one and their average, by training and
validation data only. The site is *harmed beyond chance* if the paired 95 % interval (bootstrap, 300 draws of 2,000 test
examples) of what it keeps against its local model is below 0, and *gains* if it is above 0. Rules:

    federated     every site takes the federated model
    average       every site takes the average
    naive         the best of the three by mean loss on validation data (each at its best temperature, as below)
    split, half   by validation data alone: the surer candidate, if better by half a standard error
    split         the same with one standard error
    half          with five folds of cross-validation where there are fewer than 50 validation examples; half an error
    best          `--take-home best`: the same with one standard error
    strict        the same with a one-sided 95 % bound (Student's t)
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import stdtrit

import coterie
from coterie.core.targets import Classes
from coterie.data.federation import Federation, Split
from coterie.evaluation import Predictions
from coterie.evaluation.adoption import (
    AVERAGE,
    FEDERATED,
    LOCAL,
    average,
    choose,
    compared,
    quantile,
)
from coterie.evaluation.benefit import judge, measure
from coterie.experiment.result import Result
from coterie.storage import files

SITES, FEATURES, TEST, RESAMPLES = 10, 20, 2000, 300
RULES = ("federated", "average", "naive", "split, half", "split", "half", "best", "strict")
METRICS = ("auroc", "loss", "accuracy", "balanced_accuracy")
BANDS = ((4, 8), (8, 20), (20, 50), (50, 200))  # validation examples


def federation(number: int) -> Federation:
    """Generate a federation whose truth is known: which sites share it, and which do not."""
    draw = np.random.default_rng(number)
    shared = draw.standard_normal(FEATURES)
    shared *= 2 / np.linalg.norm(shared)
    strangers = draw.uniform(0, 0.6)
    xs, ys, clients, start = [], [], {}, 0
    for i in range(SITES):
        size = int(np.exp(draw.uniform(np.log(40), np.log(800))))
        own = draw.standard_normal(FEATURES)
        apart = draw.uniform(0.5, 2.5) if draw.random() < strangers else 0.0
        w, b = shared + apart * own / np.linalg.norm(own), draw.standard_normal()
        x = draw.standard_normal((size + TEST, FEATURES))
        y = (draw.random(size + TEST) < 1 / (1 + np.exp(-(x @ w + b)))).astype(np.int64)
        place, validation = start + np.arange(size + TEST), size // (10 if number % 4 < 2 else 5)
        clients[f"site-{i + 1}"] = Split(place[validation:size], place[:validation], place[size:])
        xs.append(x.astype(np.float32))
        ys.append(y)
        start += size + TEST
    return Federation("mixed", torch.from_numpy(np.concatenate(xs)), torch.from_numpy(np.concatenate(ys)), clients, 2)


def one(number: int) -> list[dict[str, Any]]:
    """Train one federation and return a row for each site and metric: what each rule keeps, and what that is worth."""
    model = "linear" if number % 2 else "mlp"
    how: dict[str, Any] = {"engine": "stacked", "compile": True, "workers": 1, "evaluate_every": 5, "select": "loss"}
    data = federation(number)
    epochs = 2 if model == "linear" else 5
    how |= {"rounds": 25, "local_epochs": epochs, "lr": 0.1, "take_home": "best"}
    result = coterie.run("fedavg", data, model=model, seed=number, **how)
    alone = result.reference
    assert alone is not None
    assert result.take_home is not None
    tests = result.predictions, _mixed(result.predictions, alone.predictions)
    kept = [dict(_kept(result, alone, i)) for i in range(SITES)]
    rows = []
    for metric in METRICS:
        worth = {LOCAL: [(0.0, "undecided")] * SITES}
        for name, predictions in zip((FEDERATED, AVERAGE), tests, strict=True):
            trial = measure(
                result.task, metric, predictions, alone.predictions, result.names, seed=number, resamples=RESAMPLES
            )
            found = judge(metric, result.names, [trial], seed=number)
            worth[name] = [(row["gain"], row["verdict"]) for row in found.clients]
        for i in range(SITES):
            row: dict[str, Any] = {"federation": number, "model": model, "site": i, "metric": metric}
            row["validation"] = len(data.split(i).validation)
            row["worth"] = {name: each[i] for name, each in worth.items()}
            row["kept"] = kept[i]
            rows.append(row)
    return rows


def _mixed(ours: Predictions, theirs: Predictions) -> Predictions:
    return ours._replace(outputs=average(Classes(2), ours.outputs, theirs.outputs))


def _kept(result: Result, alone: Result, i: int) -> Iterator[tuple[str, str]]:
    """Yield (rule, what site `i` keeps by it)."""
    task, split = result.task, [each.of(i) for each in (_known(result.validation), _known(alone.validation))]
    held = [each.of(i) for each in (_known(result.held_out), _known(alone.held_out))] if result.held_out else split
    seen = held if len(held[0].y) else split
    means = [compared(task, each, split[1]).mean for each in (split[0], _mixed(*split))]
    yield "federated", FEDERATED
    yield "average", AVERAGE
    yield "naive", _largest(means)
    yield "split, half", choose(task, *split, errors=0.5).kept
    yield "split", choose(task, *split, errors=1).kept
    yield "half", choose(task, *seen, errors=0.5).kept
    assert result.take_home is not None
    yield "best", result.take_home.choices[i].kept
    freedom = len(seen[0].y) - 1
    bound = float(stdtrit(freedom, 0.95)) / quantile(freedom)
    yield "strict", choose(task, *seen, errors=bound).kept


def _known(found: Predictions | None) -> Predictions:
    assert found is not None
    return found


def _largest(values: list[float]) -> str:
    above = {name: value for name, value in zip((FEDERATED, AVERAGE), values, strict=True) if value > 0}
    return max(above, key=lambda name: above[name]) if above else LOCAL


def summary(rows: list[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """Return a row for each rule: harm, gains and mean gain over all sites."""
    some = [row for row in rows if row["metric"] == metric]
    harmed = [row["worth"][FEDERATED][1] == "loses" for row in some]
    helped = [row["worth"][FEDERATED][1] == "gains" for row in some]
    oracle = np.mean([max(gain for gain, _ in row["worth"].values()) for row in some])
    table = []
    for rule in RULES:
        kept = [row["worth"][row["kept"][rule]] for row in some]
        gain, loses = np.array([each[0] for each in kept]), np.array([each[1] == "loses" for each in kept])
        per = [loses[[row["federation"] == k for row in some]].mean() for k in sorted({r["federation"] for r in some})]
        table.append(
            {
                "rule": rule,
                "harmed": loses.mean(),
                "error": np.std(per, ddof=1) / math.sqrt(len(per)),
                "harmed_of_harmed": loses[harmed].mean() if any(harmed) else math.nan,
                "gains": np.mean([each[1] == "gains" for each in kept]),
                "mean_gain": gain.mean(),
                "of_oracle": gain.mean() / oracle,
                "of_winners": gain[helped].sum() / sum(r["worth"][FEDERATED][0] for r in np.array(some)[helped]),
            }
        )
    return table


def markdown(rows: list[dict[str, Any]], metric: str) -> str:
    """Return a summary as a table."""
    lines = [
        "| rule | sites harmed | of those FedAvg harms | sites that gain | mean gain | of the best | of the winners' |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in summary(rows, metric):
        shares = (f"{100 * row[key]:.0f} %" for key in ("gains",))
        lines.append(
            f"| {row['rule']} | {100 * row['harmed']:.1f} ± {100 * row['error']:.1f} % "
            f"| {100 * row['harmed_of_harmed']:.1f} % | {next(shares)} | {row['mean_gain']:+.4f} "
            f"| {100 * row['of_oracle']:.0f} % | {100 * row['of_winners']:.0f} % |"
        )
    return "\n".join(lines)


def by_size(rows: list[dict[str, Any]], metric: str) -> str:
    """Return the rule of `--take-home best`, and the same without folds, by number of validation examples."""
    lines = [
        "| validation examples | sites | keep local | harmed: best | split | FedAvg | gain: best | split | FedAvg |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for low, high in BANDS:
        some = [row for row in rows if row["metric"] == metric and low <= row["validation"] < high]
        found = [[row["worth"][row["kept"][rule]] for row in some] for rule in ("best", "split", "federated")]
        cells = [f"{100 * np.mean([row['kept']['best'] == LOCAL for row in some]):.0f} %"]
        cells += [f"{100 * np.mean([each[1] == 'loses' for each in which]):.1f} %" for which in found]
        cells += [f"{np.mean([each[0] for each in which]):+.4f}" for which in found]
        lines.append(f"| {low} to {high - 1} | {len(some)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the simulation, or print the tables of one that was run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--federations", type=int, default=200)
    parser.add_argument("--first", type=int, default=1000, help="number of the first federation, which seeds it")
    parser.add_argument("--out", type=Path, default=Path("adoption.json"))
    parser.add_argument("--table", type=Path, nargs="+", help="files of --out, of other federations each")
    given = parser.parse_args()
    if given.table:
        rows = [row for path in given.table for row in files.read_json(path)["rows"]]
    else:
        rows, begin = [], time.perf_counter()
        for number in range(given.first, given.first + given.federations):
            rows += one(number)
            done = number + 1 - given.first
            files.write_text(given.out, json.dumps({"federations": done, "first": given.first, "rows": rows}))
            print(f"{done} of {given.federations}, {time.perf_counter() - begin:.0f} s", flush=True)
    for metric in METRICS:
        print(f"\n### {metric}\n\n{markdown(rows, metric)}\n\n{by_size(rows, metric)}")


if __name__ == "__main__":
    main()
