"""Metrics of all clients at once, from their outputs laid end to end.

Classification: accuracy; balanced accuracy, the mean, over the classes that the client's examples have, of the share
found (a class absent from a client does not count against it); loss. Regression: root mean squared error, R^2, loss.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.task import Task

Scores = dict[str, NDArray[np.float64]]  # metric -> [clients]
BETTER = {"balanced_accuracy": max, "accuracy": max, "r2": max, "rmse": min, "loss": min}
METRICS = {"classification": ("balanced_accuracy", "accuracy", "loss"), "regression": ("rmse", "r2", "loss")}


def score(task: Task, outputs: Tensor, y: Tensor, owner: Tensor, clients: int) -> Scores:
    """`outputs` and `y` are [examples, ...], `owner` [examples] says whose each is; every client has at least one."""
    count = torch.bincount(owner, minlength=clients).double()

    def per_client(values: Tensor) -> Tensor:
        return torch.bincount(owner, values.double(), minlength=clients) / count

    loss = per_client(task.output_losses(outputs, y))
    if task.kind == "regression":
        squared = (
            ((outputs.reshape(y.shape) - y) ** 2).flatten(1).mean(1) if y.ndim > 1 else (outputs.reshape(-1) - y) ** 2
        )
        flat = y.double().flatten(1).mean(1) if y.ndim > 1 else y.double()
        centre = per_client(flat)
        spread = per_client((flat - centre[owner]) ** 2)
        mse = per_client(squared)
        scores = {"rmse": mse.sqrt(), "r2": torch.where(spread > 0, 1 - mse / spread, torch.nan), "loss": loss}
    else:
        num_classes = outputs.shape[1]
        right = outputs.argmax(1) == y
        while right.ndim > 1:  # one label a pixel or a word: an example counts by its share of right ones
            right = right.double().mean(-1)
        label = y if y.ndim == 1 else torch.zeros_like(owner)
        cell = owner * num_classes + label
        cells = clients * num_classes
        present = torch.bincount(cell, minlength=cells).double().reshape(clients, num_classes)
        found = torch.bincount(cell, right.double(), minlength=cells).reshape(clients, num_classes)
        recall = torch.where(present > 0, found / present.clamp_min(1), 0.0)
        balanced = recall.sum(1) / (present > 0).sum(1)
        scores = {"balanced_accuracy": balanced, "accuracy": per_client(right), "loss": loss}
    return {name: value.cpu().numpy() for name, value in scores.items()}
