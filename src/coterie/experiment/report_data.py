"""What a report needs to know and a run otherwise forgets: who has which classes, and what the models make of examples.

data.json               class names, and each client's examples by split and class
features.safetensors    features [examples, width] of test examples by each client's own model, label, client
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie import paged, rng
from coterie.data import Federation
from coterie.data.federation import SplitName
from coterie.experiment import files
from coterie.experiment.folder import FORMAT
from coterie.experiment.result import Result
from coterie.task import Task
from coterie.tree import Params, Tree

MOST = 800  # examples whose features are kept: t-SNE of so many takes a few seconds
WIDEST = 4096  # features wider than this (a model without a narrow layer before its head) are not kept


def write_facts(result: Result, federation: Federation, out: Path) -> None:
    files.write_json(out / "data.json", facts(federation))
    found = features(result, federation)
    if found is not None:
        files.write_tensors(out / "features.safetensors", found)


def facts(federation: Federation) -> dict[str, Any]:
    told: dict[str, Any] = {"format": FORMAT, "name": federation.name, "kind": federation.kind}
    told["clients"] = list(federation.names)
    parts: tuple[SplitName, ...] = ("train", "validation", "test")
    told["sizes"] = {part: [len(split[part]) for split in federation.clients.values()] for part in parts}
    if federation.num_classes is not None and federation.y.ndim == 1:
        number = federation.num_classes
        names = federation.classes or range(number)
        told["classes"] = [str(name) for name in names]
        y = federation.y.cpu().numpy()
        told["counts"] = {
            part: [np.bincount(y[split[part]], minlength=number).tolist() for split in federation.clients.values()]
            for part in parts
        }
    return told


def features(result: Result, federation: Federation) -> Params | None:
    """Of at most MOST test examples, as many of each client as of any other that has so many."""
    if result.task.head_module is None:
        return None
    positions = [split.test for split in federation.clients.values()]
    found, labels, owners = [], [], []
    for i, (name, share) in enumerate(zip(federation.names, _shares([len(own) for own in positions]), strict=True)):
        if not share:
            continue
        params = own_model(result.task, paged.take(result.views, i))
        if params is None:
            return None
        draw = rng.generator(result.config.seed, "picture", name)
        chosen = torch.from_numpy(np.sort(draw.permutation(positions[i])[:share]))
        with torch.no_grad():
            z = result.task.features(params, federation.x[chosen]).cpu()
        if z.ndim != 2 or z.shape[1] > WIDEST or not bool(torch.isfinite(z).all()):
            return None
        found.append(z.float())
        labels.append(federation.y[chosen].cpu())
        owners.append(torch.full((share,), i))
    kept = {"features": torch.cat(found), "client": torch.cat(owners)}
    if federation.num_classes is not None and federation.y.ndim == 1:
        kept["label"] = torch.cat(labels)
    return kept


def own_model(task: Task, view: Tree) -> Params | None:
    """The model in what a client deploys: the view itself, or its first part that is one or several (then the first,
    which is the client's own); None if there is none."""
    like = task.init()
    for part in [view, *(view if isinstance(view, tuple) else ())]:
        if not isinstance(part, dict) or part.keys() != like.keys():
            continue
        if all(part[name].shape == value.shape for name, value in like.items()):
            return part
        if all(_one_of(part[name], value) for name, value in like.items()):
            return {name: value[0] for name, value in part.items()}
    return None


def _one_of(several: Tensor, one: Tensor) -> bool:
    return several.ndim == one.ndim + 1 and several.shape[1:] == one.shape


def _shares(sizes: list[int]) -> list[int]:
    """How many of each client's examples: fair shares of MOST, where those with few leave room to the others."""
    shares, left = [0] * len(sizes), MOST
    order = sorted(range(len(sizes)), key=lambda i: sizes[i])
    for rank, i in enumerate(order):
        shares[i] = min(sizes[i], left // (len(order) - rank))
        left -= shares[i]
    return shares
