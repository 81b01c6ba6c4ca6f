"""Small federations with a known answer, and the settings to search them with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import coterie
from coterie.data.federation import Federation, split_again

# Nothing is compiled, so that a test takes seconds.
SMALL: dict[str, Any] = {
    "engine": "loop",
    "compile": False,
    "workers": 1,
    "model": "linear",
    "batch_size": 10,
    "report": False,
    "optimizer": {"name": "sgd"},
    "select": "balanced_accuracy",
}


def federation(kind: str, seed: int = 0, sites: int = 8, rows: int = 60, features: int = 12) -> Federation:
    """Sites whose labels are a noisy linear function of the inputs.

    Args:
        kind: "same": one function for all; "groups": two functions that contradict each other, for half of the sites
            each; "own": a function of its own for each site.
        seed: of all draws.
        sites: how many there are.
        rows: the examples of each.
        features: the number of inputs.
    """
    draw = np.random.default_rng(seed)
    functions = {"same": 1, "groups": 2, "own": sites}[kind]
    weights = draw.normal(size=(functions, features))
    if kind == "groups":
        weights[1] = -weights[0]
    clients = {}
    for i in range(sites):
        x = draw.normal(size=(rows, features)).astype(np.float32)
        logits = 4 * x @ weights[i % functions] / np.sqrt(features)
        y = draw.random(rows) < 1 / (1 + np.exp(-logits))
        clients[f"site-{i + 1}"] = (torch.from_numpy(x), torch.from_numpy(y.astype(np.int64)))
    return split_again(coterie.from_clients(clients, name=kind), validation=0.2, test=0.2, seed=seed)


def with_wrong_test_labels(given: Federation) -> Federation:
    """The same federation, in which every test label is another one."""
    y = given.y.clone()
    for split in given.clients.values():
        y[split.test] = 1 - y[split.test]
    return Federation(given.name, given.x, y, given.clients, given.num_classes)
