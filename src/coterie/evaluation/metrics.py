"""Computes the metrics of all clients at once, from their concatenated outputs.

Classification (p is the softmax of the outputs; if an example has one label per pixel or word, each label counts):
- accuracy;
- balanced_accuracy: the recall, averaged over the classes that occur among the client's examples;
- macro_f1: the mean of 2 TP / (2 TP + FP + FN) over the classes that occur or are predicted;
- auroc: one class against the rest, P(p_c of one of class c > p_c of another) + P(equal) / 2, averaged over the classes
  that some, but not all, of its examples have; NaN if there is none;
- ece: the expected calibration error, sum over 15 bins of equal width of the confidence max_c p_c, of
  |right - confidence| summed over the bin, by number;
- loss: that of the task; by default the log-loss, -log p_y.

Regression: rmse; r2 (NaN where the targets do not vary; the mean over targets where there are several); loss.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.task import Task

Scores = dict[str, NDArray[np.float64]]  # metric -> [clients]
BETTER = {
    **{"balanced_accuracy": max, "accuracy": max, "macro_f1": max, "auroc": max, "ece": min},
    **{"rmse": min, "r2": max, "loss": min},
}
LARGEST = 1e30  # that a measured number may be: sums of many such numbers are still finite
RANGES = {
    **dict.fromkeys(("balanced_accuracy", "accuracy", "macro_f1", "auroc", "ece"), (0.0, 1.0)),
    **{"rmse": (0.0, LARGEST), "r2": (-LARGEST, 1.0), "loss": (-LARGEST, LARGEST)},
}
METRICS = {
    "classification": ("balanced_accuracy", "accuracy", "macro_f1", "auroc", "ece", "loss"),
    "regression": ("rmse", "r2", "loss"),
}
AVERAGES = {"mean": "mean", "trimmed": "trimmed mean"}  # over clients, and what each is called
TRIMMED = 0.2
# With two classes, the metric must not depend on a threshold that nobody chose: with 5 % positives, 0.5 finds none.
DEFAULT = {2: "auroc"}  # by number of classes; else the first of METRICS
BINS = 15
MAX_KEPT_BYTES = 64 * 2**20  # of precomputed data in a scorer


def default_metric(num_classes: int | None) -> str:
    """Return the metric that selects rounds unless another one is asked for; None classes: a regression."""
    return METRICS["regression"][0] if num_classes is None else DEFAULT.get(num_classes, METRICS["classification"][0])


def score(task: Task, outputs: Tensor, y: Tensor, owner: Tensor, clients: int) -> Scores:
    """Compute every metric of every client.

    Args:
        task: The task, which defines the kind of data and the loss.
        outputs: The models' outputs, [examples, ...].
        y: The targets, [examples, ...].
        owner: The client of each example, [examples].
        clients: The number of clients; each has at least one example.
    """
    return Scorer(task, y, owner, clients)(outputs)


class Scorer:
    """Computes `score` repeatedly for the same examples, as in every round; precomputes what outputs do not change."""

    def __init__(self, task: Task, y: Tensor, owner: Tensor, clients: int) -> None:
        self.task, self.y, self.owner, self.clients = task, y.cpu(), owner.cpu(), clients
        self.count = torch.bincount(self.owner, minlength=clients).double()
        self._truth: _Truth | None = None

    def __call__(self, outputs: Tensor) -> Scores:
        outputs = outputs.cpu()
        if self.task.kind == "regression":
            scores = _regression(outputs, self.y, self.owner, self.count)
        else:
            flat, y, owner = flatten_labels(outputs, self.y, self.owner)
            truth = self._truth or _Truth(y, owner, self.clients, flat.shape[1])
            if truth.nbytes <= MAX_KEPT_BYTES:
                self._truth = truth
            scores = _classification(flat, y, truth)
        if not self.task.log_loss:
            losses = self.task.output_losses(outputs, self.y).double()
            scores["loss"] = torch.bincount(self.owner, losses, minlength=self.clients) / self.count
        return {name: value.numpy() for name, value in scores.items()}


def flatten_labels(outputs: Tensor, y: Tensor, owner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Flatten outputs with several labels per example to [labels, classes], [labels] and [labels]."""
    if y.ndim == 1:
        return outputs, y, owner
    each = y[0].numel()
    return outputs.movedim(1, -1).reshape(-1, outputs.shape[1]), y.reshape(-1), owner.repeat_interleave(each)


def with_one_nan(values: NDArray[np.float64]) -> list[float]:
    """Return a list in which every NaN is the same object, so that equal lists compare equal."""
    return [math.nan if value != value else value for value in values.tolist()]


def mean(values: NDArray[np.float64] | list[float], weights: NDArray[np.float64] | list[float] | None = None) -> float:
    """Average the values that are not NaN; return NaN if there are none."""
    array = np.asarray(values, dtype=float)
    there = ~np.isnan(array)
    if weights is None:
        return float(array[there].mean()) if there.any() else math.nan
    weight = np.asarray(weights, dtype=float)
    return float(np.average(array[there], weights=weight[there])) if weight[there].sum() > 0 else math.nan


def average(values: NDArray[np.float64] | list[float], how: str | None, weights: list[float] | None = None) -> float:
    """Average over clients: their `mean`, or as AVERAGES says; NaNs are left out.

    The trimmed mean leaves out a share TRIMMED of the lowest and of the highest values, and from three values on at
    least one each: so many clients cannot move it beyond the values of the others, whatever they report. Two values
    cannot be told apart.
    """
    if how != "trimmed":
        return mean(values, weights)
    array = np.asarray(values, dtype=float)
    known = np.flatnonzero(~np.isnan(array))
    out = max(1, int(TRIMMED * len(known))) if len(known) >= 3 else 0
    inner = known[np.argsort(array[known], kind="stable")][out : len(known) - out]
    return mean(array[inner], None if weights is None else [weights[i] for i in inner])


def _regression(outputs: Tensor, y: Tensor, owner: Tensor, count: Tensor) -> dict[str, Tensor]:
    y = y.double().reshape(len(y), -1)  # [examples, targets]
    clients, targets = len(count), y.shape[1]
    cell = (owner[:, None] * targets + torch.arange(targets)).flatten()

    def per_client(values: Tensor) -> Tensor:  # [clients, targets]
        return torch.bincount(cell, values.flatten(), minlength=clients * targets).reshape(clients, -1) / count[:, None]

    mse = per_client((outputs.double().reshape(y.shape) - y) ** 2)
    spread = per_client((y - per_client(y)[owner]) ** 2)
    return {"rmse": mse.mean(1).sqrt(), "r2": torch.where(spread > 0, 1 - mse / spread, torch.nan).nanmean(1)}


class _Truth:
    """What depends on the labels only: the owner and class of each label, and what `_auroc` ranks.

    A cell is a client and a class that some, but not all, of its examples have. It is a row of positions in [labels,
    classes], padded to a power of two with the position after the last. Rows are concatenated, grouped by width.
    """

    def __init__(self, y: Tensor, owner: Tensor, clients: int, classes: int) -> None:
        self.owner = owner
        self.cell = owner * classes + y
        self.first = owner * classes  # the first of the client's cells
        self.bins = owner * BINS
        self.count = torch.bincount(self.cell, minlength=clients * classes).double().reshape(clients, classes)
        self.rest = self.count.sum(1, keepdim=True) - self.count
        self.both = (self.count > 0) & (self.rest > 0)
        if classes == 2:
            self.both[:, 0] = False  # its curve mirrors that of class 1
        self.is_class = (y[:, None] == torch.arange(classes)).numpy().astype(np.uint32)
        order = torch.argsort(owner, stable=True).numpy()  # examples by client
        size = np.bincount(owner.numpy(), minlength=clients)
        begin = size.cumsum() - size
        who, label = (each.numpy() for each in self.both.nonzero(as_tuple=True))
        width = 2 ** np.ceil(np.log2(np.maximum(size, 1))).astype(np.int64)[who]
        some = np.argsort(width, kind="stable")
        who, label, width = who[some], label[some], width[some]
        self.width = [(int(wide), int(rows)) for wide, rows in zip(*np.unique(width, return_counts=True), strict=True)]
        self.begin = width.cumsum() - width  # [cells]
        self.which = who * classes + label
        self.row = np.repeat(np.arange(len(width), dtype=np.int32), width)  # [places]
        column = np.arange(len(self.row)) - self.begin[self.row]
        own = order[np.minimum(begin[who[self.row]] + column, len(order) - 1)] * classes + label[self.row]
        self.places = np.where(column < size[who[self.row]], own, len(order) * classes)

    @property
    def nbytes(self) -> int:
        return self.is_class.nbytes + self.row.nbytes + self.places.nbytes


def _classification(outputs: Tensor, y: Tensor, truth: _Truth) -> dict[str, Tensor]:
    clients, classes = truth.count.shape
    confidence, surprises = confidence_and_surprise(outputs)
    losses = surprises.gather(1, y[:, None])[:, 0].double()
    found = outputs.argmax(1)
    right = (found == y).double()
    predicted = torch.bincount(truth.first + found, minlength=clients * classes).double().reshape(clients, classes)
    hits = torch.bincount(truth.cell, right, minlength=clients * classes).reshape(clients, classes)
    count = truth.count.sum(1)
    gap = torch.bincount(truth.bins + bin_of(confidence), right - confidence, minlength=clients * BINS)
    return {
        "balanced_accuracy": (hits / truth.count).nanmean(1),  # 0 / 0 where a class is absent
        "accuracy": hits.sum(1) / count,
        "macro_f1": (2 * hits / (truth.count + predicted)).nanmean(1),
        "auroc": _auroc(surprises, truth),
        "ece": gap.reshape(clients, BINS).abs().sum(1) / count,
        "loss": torch.bincount(truth.owner, losses, minlength=clients) / count,
    }


def confidence_and_surprise(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return max_c p_c, [labels], and -log p as float32, [labels, classes], by which `_auroc` ranks.

    Logarithms keep values near p = 1 distinct.
    """
    below = outputs.double()
    below = below - below.amax(1, keepdim=True)
    total = below.exp().sum(1, keepdim=True)
    return 1 / total[:, 0], (total.log() - below).float()


def bin_of(confidence: Tensor) -> Tensor:
    """Return the calibration bin of each confidence."""
    return (confidence * BINS).ceil().long().clamp(1, BINS) - 1


def _auroc(surprises: Tensor, truth: _Truth) -> Tensor:
    """Compute the AUROC from rank sums: (ranks of class c - their minimum) / number of pairs.

    Each cell is ranked by sorting integers made of (score, whether the label is of the class); ties share their mean
    rank. The bits of non-negative floats sort like the floats.
    """
    keys = np.empty(truth.is_class.size + 1, np.uint32)
    keys[:-1] = (surprises.numpy().view(np.uint32) << 1 | truth.is_class).ravel()
    keys[-1] = 2**32 - 2  # of no class, and larger than all others
    line = keys.take(truth.places)
    start = 0
    for wide, rows in truth.width:
        line[start : start + wide * rows].reshape(rows, wide).sort(1)
        start += wide * rows
    new = np.empty(len(line), bool)  # where a value differs from the one before
    np.greater(line[1:] ^ line[:-1], 1, out=new[1:])
    new[truth.begin] = True
    starts = np.flatnonzero(new)
    size = np.diff(starts, append=len(line))
    members = np.flatnonzero((line & 1).astype(bool))
    row = truth.row[members]
    rank = np.repeat(starts + (size + 1) / 2, size)[members] - truth.begin[row]
    ranks = np.zeros(truth.count.numel())
    ranks[truth.which] = np.bincount(row, rank, minlength=len(truth.begin))
    lowest = truth.count * (truth.count + 1) / 2
    ranked = torch.from_numpy(ranks).reshape(truth.count.shape)
    area = 1 - (ranked - lowest) / (truth.count * truth.rest)  # surprise falls as p rises
    return torch.where(truth.both, area, torch.nan).nanmean(1)
