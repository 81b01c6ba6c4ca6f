"""Why some defaults gain less than others in docs/defaults.md: a small experiment for each explanation that it gives.

    python benchmarks/defaults_why.py [--only METHOD] [--quick]

For each, what the explanation says should matter is changed, and nothing else. Training alone has the same settings as
far as it has them (rounds, step size, epochs). Digits, two seeds, as in `benchmarks/defaults.py`; a row is the test
accuracy of the method and of training alone, and the gain. What was found is told in benchmarks/defaults.toml.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import coterie
from coterie.core.batches import Batch, Batches
from coterie.core.method import Info
from coterie.core.task import Task
from coterie.core.training import train
from coterie.core.tree import Params
from coterie.evaluation.metrics import mean
from coterie.methods import PFedVMP
from coterie.methods.pfedvmp import Server, Up

SEEDS = (0, 1)
ALONE = ("rounds", "lr", "local_epochs")  # settings that training alone has as well
DIRICHLET: Mapping[str, Any] = {"data": "digits"}
IID: Mapping[str, Any] = {"data": "digits", "partition": "iid", "clients": 10}


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
class Row:
    method: str
    case: str
    settings: Mapping[str, Any]


def rows() -> list[Row]:
    """Return every run of the experiments, in the order of the explanations."""
    found = []
    for case in ("Dirichlet 0.3", "IID"):
        for settings in ({}, {"rounds": 100}, {"rounds": 300}, {"lr": 0.2}, {"rounds": 100, "lr": 0.2}):
            found.append(Row("fedbabu", case, settings))
        steps = ({}, {"prox_steps": 20}, {"lam": 1.0}, {"lam": 1.0, "prox_steps": 20}, {"rounds": 100})
        found += [Row("pfedme", case, settings) for settings in steps]
        for rounds in (30, 100, 300):
            found += [Row(name, case, {"rounds": rounds}) for name in ("fedper", "pfedvmp", "following")]
        found += [Row("pfedvmp", case, {"xi1": xi1}) for xi1 in (0.0, 5.0, 20.0)]
        found += [Row("pfedbred", case, settings) for settings in ({}, {"prox_steps": 1})]
        found.append(Row("local", case, {"local_epochs": 5}))
    return found


def score(row: Row, quick: bool) -> float:
    """Return the mean test accuracy of clients and seeds."""
    common = {**(IID if row.case == "IID" else DIRICHLET), "select": "accuracy", "report": False}
    settings = {**common, **row.settings}
    settings["evaluate_every"] = max(5, settings.get("rounds", 30) // 10)
    if quick:
        settings |= {"rounds": 2, "local_steps": 2, "evaluate_every": 1}
        settings.pop("local_epochs", None)
    if row.method != "following":
        compared = coterie.compare([row.method], SEEDS[: 1 if quick else 2], **settings)
        return mean([mean(each) for each in compared.scores(row.method)])
    lr = settings.pop("lr", 0.05)
    labelled = {"following": Following(coterie.SGD(lr))}
    compared = coterie.compare(labelled, SEEDS[: 1 if quick else 2], **settings)
    return mean([mean(each) for each in compared.scores("following")])


def main(arguments: Sequence[str] | None = None) -> int:
    asking = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    asking.add_argument("--only", help="only this method's rows", metavar="METHOD")
    asking.add_argument("--quick", action="store_true", help="a smoke test: two rounds of two steps, one seed")
    asked = asking.parse_args(arguments)
    alone: dict[tuple[str, str], float] = {}
    print("| method | digits | settings | scores | alone | gain |\n|---|---|---|---|---|---|", flush=True)
    for row in rows():
        if asked.only and asked.only != row.method:
            continue
        same = {name: row.settings[name] for name in ALONE if name in row.settings}
        key = row.case, str(same)
        if key not in alone:
            alone[key] = score(Row("local", row.case, same), asked.quick)
        found = score(row, asked.quick)
        told = ", ".join(f"{name} {value:g}" for name, value in row.settings.items()) or "defaults"
        numbers = f"{100 * found:.1f} | {100 * alone[key]:.1f} | {100 * (found - alone[key]):+.1f}"
        print(f"| {row.method} | {row.case} | {told} | {numbers} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
