"""Metrics of all clients at once, from their outputs laid end to end.

Classification (p is the softmax of the outputs; where an example has a label a pixel or a word, each label counts):
- accuracy;
- balanced_accuracy: the mean, over the classes that the client's examples have, of the share found (a class absent
  from a client does not count against it);
- macro_f1: the mean of 2 TP / (2 TP + FP + FN) over the classes that its examples have or are said to have;
- auroc: one class against the rest, P(p_c of one of class c > p_c of another) + P(equal) / 2, averaged over the classes
  that some of its examples have and some have not; NaN if there is none;
- ece: the expected calibration error, sum over 15 bins of equal width of the confidence max_c p_c, of
  |right - confidence| summed over the bin, by number;
- loss: the task's own; unless you gave another it is the log-loss, -log p_y.

Regression: rmse; r2 (NaN where the targets do not vary; the mean over targets where there are several); loss.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.task import Task

Scores = dict[str, NDArray[np.float64]]  # metric -> [clients]
BETTER = {
    **{"balanced_accuracy": max, "accuracy": max, "macro_f1": max, "auroc": max, "ece": min},
    **{"rmse": min, "r2": max, "loss": min},
}
METRICS = {
    "classification": ("balanced_accuracy", "accuracy", "macro_f1", "auroc", "ece", "loss"),
    "regression": ("rmse", "r2", "loss"),
}
BINS = 15


def score(task: Task, outputs: Tensor, y: Tensor, owner: Tensor, clients: int) -> Scores:
    """`outputs` and `y` are [examples, ...], `owner` [examples] says whose each is; every client has at least one."""
    outputs, y, owner = outputs.cpu(), y.cpu(), owner.cpu()
    count = torch.bincount(owner, minlength=clients).double()
    loss = torch.bincount(owner, task.output_losses(outputs, y).double(), minlength=clients) / count
    if task.kind == "regression":
        scores = _regression(outputs, y, owner, count)
    else:
        scores = _classification(*one_label_each(outputs, y, owner), clients)
    return {name: value.numpy() for name, value in {**scores, "loss": loss}.items()}


def one_label_each(outputs: Tensor, y: Tensor, owner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[labels, classes], [labels] and [labels], where outputs [examples, classes, ...] may have a label a pixel."""
    if y.ndim == 1:
        return outputs, y, owner
    each = y[0].numel()
    return outputs.movedim(1, -1).reshape(-1, outputs.shape[1]), y.reshape(-1), owner.repeat_interleave(each)


def plain(values: NDArray[np.float64]) -> list[float]:
    """As a list in which every NaN is the same one, so that equal lists compare equal."""
    return [math.nan if value != value else value for value in values.tolist()]


def mean(values: NDArray[np.float64] | list[float], weights: NDArray[np.float64] | list[float] | None = None) -> float:
    """The average of what is defined; NaN if nothing is."""
    array = np.asarray(values, dtype=float)
    weight = np.ones(len(array)) if weights is None else np.asarray(weights, dtype=float)
    there = ~np.isnan(array)
    return float(np.average(array[there], weights=weight[there])) if weight[there].sum() > 0 else math.nan


def _regression(outputs: Tensor, y: Tensor, owner: Tensor, count: Tensor) -> dict[str, Tensor]:
    y = y.double().reshape(len(y), -1)  # [examples, targets]
    clients, targets = len(count), y.shape[1]
    cell = (owner[:, None] * targets + torch.arange(targets)).flatten()

    def per_client(values: Tensor) -> Tensor:  # [clients, targets]
        return torch.bincount(cell, values.flatten(), minlength=clients * targets).reshape(clients, -1) / count[:, None]

    mse = per_client((outputs.double().reshape(y.shape) - y) ** 2)
    spread = per_client((y - per_client(y)[owner]) ** 2)
    return {"rmse": mse.mean(1).sqrt(), "r2": torch.where(spread > 0, 1 - mse / spread, torch.nan).nanmean(1)}


def _classification(outputs: Tensor, y: Tensor, owner: Tensor, clients: int) -> dict[str, Tensor]:
    classes = outputs.shape[1]
    confidence = confidence_of(outputs)
    found = outputs.argmax(1)
    right = (found == y).double()
    truth = torch.bincount(owner * classes + y, minlength=clients * classes).double().reshape(clients, classes)
    said = torch.bincount(owner * classes + found, minlength=clients * classes).double().reshape(clients, classes)
    hits = torch.bincount(owner * classes + y, right, minlength=clients * classes).reshape(clients, classes)
    count = truth.sum(1)
    gap = torch.bincount(owner * BINS + bin_of(confidence), right - confidence, minlength=clients * BINS)
    return {
        "balanced_accuracy": (hits / truth).nanmean(1),  # 0 / 0 where a class is absent
        "accuracy": hits.sum(1) / count,
        "macro_f1": (2 * hits / (truth + said)).nanmean(1),
        "auroc": _auroc(outputs, y, owner, truth),
        "ece": gap.reshape(clients, BINS).abs().sum(1) / count,
    }


def confidence_of(outputs: Tensor) -> Tensor:
    """max_c p_c, [labels]."""
    return 1 / (outputs - outputs.amax(1, keepdim=True)).double().exp().sum(1)


def bin_of(confidence: Tensor) -> Tensor:
    return (confidence * BINS).ceil().long().clamp(1, BINS) - 1


def surprise(outputs: Tensor) -> Tensor:
    """-log p as float32, [labels, classes]: the scores that `auroc` ranks. As logarithms they stay apart near p = 1."""
    return outputs.double().log_softmax(1).abs().float()


def _auroc(outputs: Tensor, y: Tensor, owner: Tensor, truth: Tensor) -> Tensor:
    """By the rank sum: sum of the ranks of class c, less what it is if they are lowest, over the number of pairs.

    All clients and classes are ranked at once, by one sort of whole numbers made of (client and class, score, whether
    it is of the class); ties share their mean rank. The bits of floats that are not negative sort as the floats do.
    """
    clients, classes = truth.shape
    rest = truth.sum(1, keepdim=True) - truth
    both = (truth > 0) & (rest > 0)
    if classes == 2:
        both[:, 0] = False  # its curve is that of class 1 turned round
    row, label = both[owner].nonzero(as_tuple=True)
    bits = surprise(outputs).view(torch.int32)[row, label].long()
    key = ((owner[row] * classes + label) << 33) | (bits << 1) | (y[row] == label).long()
    line = np.sort(key.numpy())
    number = len(line)
    starts = np.flatnonzero(np.r_[True, line[1:] >> 1 != line[:-1] >> 1][:number])  # of ties
    size = np.diff(np.r_[starts, number])
    rank = np.repeat(starts + (size + 1) / 2, size)
    cell, positive = line >> 33, line & 1
    members = np.bincount(cell, minlength=clients * classes)
    ranks = np.bincount(cell, rank * positive, minlength=clients * classes).reshape(clients, classes)
    before = (members.cumsum() - members).reshape(clients, classes)  # ranks count from the beginning of the line
    lowest = truth * torch.from_numpy(before) + truth * (truth + 1) / 2
    area = 1 - (torch.from_numpy(ranks) - lowest) / (truth * rest)  # surprise falls as p rises
    return torch.where(both, area, torch.nan).nanmean(1)
