"""Keep what a report needs beyond the results: who has which classes, and the features that models compute.

data.json               class names, and each client's examples by split and class
features.safetensors    features [examples, width] of test examples by each client's own model, label, client
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core import client_rows, rng
from coterie.core.task import Task
from coterie.core.tree import Params, Tree
from coterie.data import Federation
from coterie.data.federation import SplitName
from coterie.engine.engine import one_thread
from coterie.experiment.result import Result
from coterie.storage import files
from coterie.storage.run_folder import FORMAT

MAX_EXAMPLES = 500  # whose features are kept: t-SNE of this many takes a quarter of a second
MAX_WIDTH = 4096  # wider features (of a model without a narrow layer before its head) are not kept


def write_federation(result: Result, federation: Federation, out: Path) -> None:
    """Write data.json and, if the model has features, features.safetensors into the run folder `out`."""
    files.write_json(out / "data.json", describe_federation(federation))
    found = features(result, federation)
    if found is not None:
        files.write_tensors(out / "features.safetensors", found)


def describe_federation(federation: Federation) -> dict[str, Any]:
    """Return the content of data.json."""
    found: dict[str, Any] = {"format": FORMAT, "name": federation.name, "kind": federation.kind}
    found["clients"] = list(federation.names)
    parts: tuple[SplitName, ...] = ("train", "validation", "test")
    found["sizes"] = {part: [len(split[part]) for split in federation.clients.values()] for part in parts}
    if federation.num_classes is not None and federation.y.ndim == 1:
        number = federation.num_classes
        names = federation.classes or range(number)
        found["classes"] = [str(name) for name in names]
        y = federation.y.cpu().numpy()
        found["counts"] = {
            part: [np.bincount(y[split[part]], minlength=number).tolist() for split in federation.clients.values()]
            for part in parts
        }
    return found


@one_thread()  # a client has few examples
def features(result: Result, federation: Federation) -> Params | None:
    """Return the features of up to MAX_EXAMPLES test examples, balanced across clients.

    Returns:
        Tensors "features", "client" and, for a classification, "label"; None if the model has no usable features.
    """
    if result.task.head_module is None:
        return None
    positions = [split.test for split in federation.clients.values()]
    found, labels, owners = [], [], []
    for i, (name, share) in enumerate(zip(federation.names, _shares([len(own) for own in positions]), strict=True)):
        if not share:
            continue
        task = result.task_of(i)
        params = own_model(task, client_rows.take(result.views, i))
        if params is None:
            return None
        draw = rng.generator(result.config.seed, "picture", name)
        chosen = torch.from_numpy(np.sort(draw.permutation(positions[i])[:share]))
        with torch.no_grad():
            z = task.features(params, federation.x[chosen]).cpu()
        if z.ndim != 2 or z.shape[1] > MAX_WIDTH or not bool(torch.isfinite(z).all()):
            return None
        found.append(z.float())
        labels.append(federation.y[chosen].cpu())
        owners.append(torch.full((share,), i))
    kept = {"features": torch.cat(found), "client": torch.cat(owners)}
    if federation.num_classes is not None and federation.y.ndim == 1:
        kept["label"] = torch.cat(labels)
    return kept


def own_model(task: Task, view: Tree) -> Params | None:
    """Return the model within what a client deploys, or None if there is none.

    It is the view itself, or the first part of it that is a model, or that is several models, of which the first is
    the client's own.
    """
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
    """Return how many examples to take from each client: fair shares of MAX_EXAMPLES.

    Clients with fewer examples than their share leave room for the others.
    """
    shares, left = [0] * len(sizes), MAX_EXAMPLES
    order = sorted(range(len(sizes)), key=lambda i: sizes[i])
    for rank, i in enumerate(order):
        shares[i] = min(sizes[i], left // (len(order) - rank))
        left -= shares[i]
    return shares
