"""Why some defaults gain less than others in docs/defaults.md: a small experiment for each explanation that it gives.

    COTERIE_DATA=... python benchmarks/defaults_why.py [--only METHOD] [--case NAME] [--quick]

For each, what the explanation says should matter is changed, and nothing else. Training alone has the same settings as
far as it has them (rounds, step size, minibatches). A row is the test metric of the method and of training alone, the
gain, and where clients are few the gain of each. Digits have two seeds, as in `benchmarks/defaults.py`, and hospitals
five. What was found is told in benchmarks/defaults.toml.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from defaults import cases, choosing_cases
from sklearn import datasets
from torch import Tensor
from torch.func import grad

import coterie
from coterie.core import tree
from coterie.core.batches import Batch, Batches
from coterie.core.method import Info
from coterie.core.scan import scan
from coterie.core.task import Task
from coterie.core.training import train
from coterie.core.tree import Params
from coterie.evaluation.metrics import mean
from coterie.methods import FedMAP, PFedVMP
from coterie.methods.fedmap import Client
from coterie.methods.fedmap import Up as Theta
from coterie.methods.pfedvmp import Server, Up
from coterie.parts.priors import Gamma
from coterie.parts.pulls import HELD_BACK, pull_of_a_round

ALONE = ("rounds", "lr", "local_epochs", "local_steps", "batch_size")  # settings that training alone has as well
FEW = 8  # clients, whose gains are told one by one


@dataclass(frozen=True)
class Case:
    settings: Mapping[str, Any]
    seeds: Sequence[int] = (0, 1)


CASES = {
    "digits, Dirichlet 0.3": Case({"data": "digits", "select": "accuracy"}),
    "digits, IID": Case({"data": "digits", "partition": "iid", "clients": 10, "select": "accuracy"}),
    "heart disease": Case(
        {**next(case.settings for case in cases() if case.name == "heart disease"), "select": "auroc"}, range(5)
    ),
    "the demo's hospitals": Case({"data": "hospitals", "select": "auroc"}, range(5)),
}
SMALL = ("diabetes, 4 by age", "diabetes, 4 by pressure", "diabetes, 6 alike", "cancer, 8 alike of 30")
CHOOSING = {case.name: case for case in choosing_cases() if case.name.startswith("digits")}


@cache
def small_silos() -> Mapping[str, Case]:
    """Make federations of sites with 30 to 110 rows each from scikit-learn's data, as files for `--silos`."""
    folder, draw = Path(tempfile.mkdtemp(prefix="coterie-silos-")), np.random.default_rng(0)
    sick, cancer = datasets.load_diabetes(), datasets.load_breast_cancer()
    some = draw.permutation(len(cancer.target))[:240]
    worse = (sick.target > 140).astype(int)  # half of the patients
    found: dict[str, Case] = {}
    for name, x, y, order, sites in (
        (SMALL[0], sick.data, worse, np.argsort(sick.data[:, 0], kind="stable"), 4),
        (SMALL[1], sick.data, worse, np.argsort(sick.data[:, 3], kind="stable"), 4),
        (SMALL[2], sick.data, worse, draw.permutation(len(worse)), 6),
        (SMALL[3], cancer.data[some], cancer.target[some], draw.permutation(len(some)), 8),
    ):
        paths = []
        for site, rows in enumerate(np.array_split(order, sites)):
            paths.append(folder / f"{len(found)}-{site}.csv")
            header = ",".join([*(f"f{i}" for i in range(x.shape[1])), "target"])
            np.savetxt(paths[-1], np.column_stack([x, y])[rows], "%.6g", ",", header=header, comments="")
        settings = {"silos": [str(path) for path in paths], "target": "target", "class_weights": "balanced"}
        found[name] = Case({**settings, "rounds": 20, "select": "auroc"}, range(5))
    return found


def case_of(name: str) -> Case:
    if name in CHOOSING:
        return Case({**CHOOSING[name].settings, "select": CHOOSING[name].metric}, (5, 6))
    return CASES[name] if name in CASES else small_silos()[name]


@dataclass(frozen=True)
class Following(PFedVMP):
    """pFedVMP whose centroids grow with the features, so that none can lag: only their direction is the round before's.

    Each is multiplied by the number that brings it nearest to the mean of its class's features in the minibatch.
    """

    def local_update(self, task: Task, client: Params, down: Server, batches: Batches) -> tuple[Params, Up, Info]:
        anchor = (down.centroid, down.known, torch.tensor(self._strength(task)))
        theta, loss = train(task, self.optimizer, {**client, **down.body}, batches, anchor=anchor, feature_penalty=near)
        body = task.sent({name: theta[name] for name in down.body})
        class_size, mean, spread = self._moments(task, theta, batches.epoch(0))
        return theta, Up(body, batches.count, class_size, mean, spread), {"loss": loss}


def near(features: Tensor, batch: Batch, anchor: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the distance of features from centroids that are as long as the minibatch's features want them."""
    centroid, known, strength = anchor
    here = (batch.mask > 0).to(features.dtype) * known[batch.y]
    whose = torch.nn.functional.one_hot(batch.y, len(centroid)).to(features.dtype) * here[:, None]
    total = whose.T @ features.detach()  # [classes, dim]
    wanted = (total * centroid).sum(1) / (whose.sum(0) * (centroid**2).sum(1)).clamp_min(1e-12)
    distance = ((features - (wanted[:, None] * centroid)[batch.y]) ** 2).mean(1)
    return strength * (distance * here).sum() / (batch.mask > 0).sum().clamp_min(1.0)


@dataclass(frozen=True)
class Weighed(FedMAP):
    """FedMAP whose pull is the evidence that a client is like the others.

    The gradient of a client's loss at gamma is that of its distribution plus chance. `share_of_chance` says how much
    is chance, and that share of the client's way is taken back: all of it where the client's examples do not show
    that it differs from the others, little where they do. A pull that takes s of the way back a round leaves
    (1 - exp(-s)) / s of it along a gradient that stays the same. By that the way that is sent is made longer again, so
    that gamma moves as far as without a pull: what all clients have in common is learnt no slower.
    """

    def local_update(self, task: Task, client: Client, down: Gamma, batches: Batches) -> tuple[Client, Theta, Info]:
        share = share_of_chance(task, down.mu, batches.once())
        own = tree.where(client.rounds > 0, client.theta, down.mu)
        # What `pull_of_a_round` makes of a pull of 1, times -log of what is left of the way.
        back = -torch.log1p(-share)
        strength = pull_of_a_round(self.optimizer, 1.0, task.split(own)[0], batches) * back
        start = self._start(task, own, down, strength, batches)
        theta, loss = train(task, self.optimizer, start, batches, self._rho.penalty, (down, strength))
        trained, buffers = task.split(task.sent(theta))
        longer = torch.where(back > 1e-6, back / -torch.expm1(-back), 1.0)
        trained = {name: down.mu[name] + longer * (value - down.mu[name]) for name, value in trained.items()}
        return Client(theta, client.rounds + 1), Theta(trained, batches.count.log(), buffers), {"loss": loss}


def share_of_chance(task: Task, params: Params, batches: Batches) -> Tensor:
    """Return the share of the mean gradient's squared length that is chance, a scalar from 0 to 0.99.

    It is s^2 / ||g||^2, s^2 the squared standard error of the mean gradient g of all examples, from the gradients of
    half minibatches. With one example it is not known, and `HELD_BACK` is returned.
    """

    def step(carry: Any, aux: Any, batch: Batch) -> Any:
        total, square, seen, groups = carry
        trained, rest = aux
        odd = torch.arange(len(batch.mask)) % 2
        for half in (odd, 1 - odd):
            some = batch._replace(mask=batch.mask * half)
            count = some.mask.sum()
            g = tree.pack(grad(lambda values, some=some: task.loss({**values, **rest}, some)[0])(trained))
            total = tree.map(lambda t, v, count=count: t + count * v, total, g)
            square, seen, groups = square + count * tree.dot(g, g), seen + count, groups + (count > 0)
        return total, square, seen, groups

    trained, rest = task.split(params)
    zero = torch.zeros(())
    start = tree.map(torch.zeros_like, tree.pack(trained)), zero, zero, zero
    total, square, seen, groups = scan(step, start, (trained, rest), batches)
    length = tree.dot(total, total) / seen**2
    error = (square / seen - length).clamp_min(0) / (groups - 1).clamp_min(1)
    return torch.where(groups > 1, (error / length.clamp_min(1e-30)).clamp(0, 0.99), HELD_BACK)


@dataclass(frozen=True)
class Row:
    method: str
    case: str
    settings: Mapping[str, Any]


def rows() -> list[Row]:
    """Return every run of the experiments, in the order of the explanations."""
    found = []
    bodies: list[dict[str, Any]] = [{}, {"rounds": 100}, {"lr": 0.2}, {"rounds": 100, "lr": 0.2}]
    sizes: list[dict[str, Any]] = [{"local_steps": 10, "batch_size": size} for size in (10, 100)]
    pulled: list[dict[str, Any]] = [{}, {"prox_steps": 20}, {"lam": 1.0}, *sizes, {"rounds": 100}]
    maps: list[dict[str, Any]] = [{}, {"pull": 0.5}, {"pull": 1.0}, {"start": "own"}]
    for case in ("digits, Dirichlet 0.3", "digits, IID"):
        found += [Row("fedbabu", case, settings) for settings in bodies]
        found += [Row("pfedme", case, settings) for settings in pulled]
        for rounds in (30, 100):
            found += [Row(name, case, {"rounds": rounds}) for name in ("fedper", "pfedvmp", "following")]
        found.append(Row("pfedbred", case, {}))
        found.append(Row("local", case, {"local_epochs": 5}))
    for case in ("heart disease", "the demo's hospitals"):
        found += [Row("fedmap", case, settings) for settings in maps]
        found += [Row(name, case, {}) for name in ("fedavg", "fedavg-ft", "ditto", "apfl", "fedamp", "weighed")]
    for case in (*SMALL, *CHOOSING):
        found += [Row("fedmap", case, {}), Row("fedmap", case, {"pull": 0.5}), Row("fedmap", case, {"pull": 1.0})]
        found += [Row(name, case, {}) for name in ("weighed", "fedavg", "fedavg-ft")]
    return found


def scores(row: Row, quick: bool) -> list[float]:
    """Return every client's test metric, the mean over seeds."""
    case = case_of(row.case)
    settings = {"report": False, **case.settings, **row.settings}
    settings["evaluate_every"] = max(5, settings.get("rounds", 0) // 10)
    if quick:
        settings |= {"rounds": 2, "local_steps": 2, "evaluate_every": 1}
        settings.pop("local_epochs", None)
    method: Any = [row.method]
    if row.method == "following":
        method = {"following": Following(coterie.SGD(settings.pop("lr", 0.05)))}  # an instance has its step size
    if row.method == "weighed":
        optimizer = coterie.Adam(1e-3) if "silos" in settings else coterie.SGD(settings.pop("lr", 0.05))
        method = {"weighed": Weighed(optimizer)}
    compared = coterie.compare(method, case.seeds[:1] if quick else case.seeds, **settings)
    return [mean(list(each)) for each in zip(*compared.scores(row.method), strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    asking = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    asking.add_argument("--only", help="only this method's rows", metavar="METHOD")
    asking.add_argument("--case", help="only federations whose name contains this", metavar="NAME", default="")
    asking.add_argument("--quick", action="store_true", help="a smoke test: two rounds of two steps, one seed")
    asked = asking.parse_args(arguments)
    alone: dict[tuple[str, str], list[float]] = {}
    print(
        "| method | federation | settings | scores | alone | gain | of each |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    for row in rows():
        if (asked.only and asked.only != row.method) or asked.case not in row.case:
            continue
        same = {name: row.settings[name] for name in ALONE if name in row.settings and row.method != "local"}
        key = row.case, str(same)
        if key not in alone:
            alone[key] = scores(Row("local", row.case, same), asked.quick)
        found = scores(row, asked.quick)
        gains = [100 * (one - other) for one, other in zip(found, alone[key], strict=True)]
        told = ", ".join(f"{name} {value}" for name, value in row.settings.items()) or "defaults"
        each = ", ".join(f"{gain:+.1f}" for gain in gains) if len(gains) <= FEW else ""
        numbers = f"{100 * mean(found):.1f} | {100 * mean(alone[key]):.1f} | {mean(gains):+.1f} | {each}"
        print(f"| {row.method} | {row.case} | {told} | {numbers} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
