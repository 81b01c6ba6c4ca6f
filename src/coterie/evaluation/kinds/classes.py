"""Metrics of a classification; p is the softmax of the outputs. With one label per pixel or word, each label counts.

- accuracy;
- balanced_accuracy: the recall, averaged over the classes that occur among the client's examples;
- macro_f1: the mean of 2 TP / (2 TP + FP + FN) over the classes that occur or are predicted;
- auroc: one class against the rest, P(p_c of one of class c > p_c of another) + P(equal) / 2, averaged over the classes
  that some, but not all, of its examples have; NaN if there is none;
- ece: the expected calibration error, sum over 15 bins of equal width of the confidence max_c p_c, of
  |right - confidence| summed over the bin, by number;
- loss: that of the task; by default the log-loss, -log p_y.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.targets import Target
from coterie.evaluation.bootstrap import Array, Mask, Statistic, Weights, counted, mean_ratio, product, tally
from coterie.evaluation.predictions import Predictions

NAMES = ("balanced_accuracy", "accuracy", "macro_f1", "auroc", "ece", "loss")
THRESHOLDED = ("balanced_accuracy", "accuracy", "macro_f1")  # the metrics that depend on a threshold
BINS = 15
MAX_KEPT_BYTES = 64 * 2**20  # of precomputed data in a scorer
MAX_PAIRS_PER_OTHER = 32  # in the wrong order: up to here visiting the pairs is faster than cumulative sums
_SIDES: tuple[Literal["left"], Literal["right"]] = ("left", "right")


def names(target: Target) -> tuple[str, ...]:
    """Return the metrics."""
    return NAMES


def default(target: Target) -> str:
    """Return the metric that selects rounds unless another one is asked for.

    With two classes, it must not depend on a threshold that nobody chose: with 5 % positives, 0.5 finds none.
    """
    return "auroc" if target.num_classes == 2 else "balanced_accuracy"


def scorer(target: Target, y: Tensor, owner: Tensor, clients: int) -> Callable[[Tensor], dict[str, Tensor]]:
    """Return a function from outputs to every client's metrics, [clients]; what outputs do not change is kept."""
    kept: list[Truth] = []

    def scores(outputs: Tensor) -> dict[str, Tensor]:
        flat, labels, whose = flatten_labels(outputs, y, owner)
        truth = kept[0] if kept else Truth(labels, whose, clients, flat.shape[1])
        if not kept and truth.nbytes <= MAX_KEPT_BYTES:
            kept.append(truth)
        return _scores(flat, labels, truth)

    return scores


def statistic(target: Target, metric: str, one: Predictions) -> Statistic:
    """Return a metric of one client as a function of weights."""
    outputs, y, example = flatten_labels(one.outputs, one.y, torch.arange(len(one.y)))
    labels, found, index = y.numpy(), outputs.argmax(1).numpy(), example.numpy()
    shape = (len(one.y), outputs.shape[1])
    truth = tally(shape, index, labels)
    if metric == "auroc":
        return _auroc(confidence_and_surprise(outputs)[1].double().numpy(), labels, index, truth)
    right = (labels == found).astype(float)
    if metric == "ece":
        confidence, _ = confidence_and_surprise(outputs)
        gaps = tally((len(one.y), BINS), index, bin_of(confidence).numpy(), right - confidence.numpy())
        return lambda weights: np.abs(product(weights, gaps)).sum(1) / counted(weights, truth.sum(1))
    hits = tally(shape, index, labels, right)
    if metric == "accuracy":
        pair = np.stack([hits.sum(1), truth.sum(1)], 1)
        return lambda weights: np.divide(*counted(weights, pair).T)
    above, below = hits, truth
    if metric == "macro_f1":
        above, below = 2 * hits, truth + tally(shape, index, found)
    both = np.hstack([above, below])  # one product, since reading the weights is most of its work
    return lambda weights: mean_ratio(*np.hsplit(counted(weights, both), 2))


def depends_on(target: Target, metric: str, one: Predictions) -> Tensor:
    """Return what a metric depends on, [examples, ...]."""
    if metric not in THRESHOLDED:
        return one.outputs
    found = one.outputs.argmax(1)
    return found if metric == "macro_f1" else found == one.y


def flatten_labels(outputs: Tensor, y: Tensor, owner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Flatten outputs with several labels per example to [labels, classes], [labels] and [labels]."""
    if y.ndim == 1:
        return outputs, y, owner
    each = y[0].numel()
    return outputs.movedim(1, -1).reshape(-1, outputs.shape[1]), y.reshape(-1), owner.repeat_interleave(each)


class Truth:
    """What depends on the labels only: the owner and class of each label, and what `auroc_of_cells` ranks.

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


def _scores(outputs: Tensor, y: Tensor, truth: Truth) -> dict[str, Tensor]:
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
        "auroc": auroc_of_cells(surprises, truth),
        "ece": gap.reshape(clients, BINS).abs().sum(1) / count,
        "loss": torch.bincount(truth.owner, losses, minlength=clients) / count,
    }


def confidence_and_surprise(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return max_c p_c, [labels], and -log p as float32, [labels, classes], by which `auroc_of_cells` ranks.

    Logarithms keep values near p = 1 distinct.
    """
    below = outputs.double()
    below = below - below.amax(1, keepdim=True)
    total = below.exp().sum(1, keepdim=True)
    return 1 / total[:, 0], (total.log() - below).float()


def bin_of(confidence: Tensor) -> Tensor:
    """Return the calibration bin of each confidence."""
    return (confidence * BINS).ceil().long().clamp(1, BINS) - 1


def auroc_of_cells(surprises: Tensor, truth: Truth) -> Tensor:
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


def _auroc(scores: Array, labels: NDArray[np.int64], index: NDArray[np.int64], truth: Array) -> Statistic:
    """Return the weighted AUROC, where `scores` s [labels, classes] are lower the likelier the class is.

    For class c and weights w it is

        1 - sum_{i in c, j not in c} w_i w_j ([s_jc < s_ic] + [s_jc <= s_ic]) / 2 sum_{i in c, j not in c} w_i w_j.

    The sums are whole numbers, at most labels^2 / 2, and therefore exact.
    """
    classes = np.flatnonzero((truth.sum(0) > 0) & (truth.sum(0) < truth.sum()))
    classes = classes[classes == 1] if scores.shape[1] == 2 else classes
    whole = np.float32 if len(labels) ** 2 / 2 <= 2**24 else np.float64
    each = len(labels) // len(truth)  # labels per example
    curves = []
    for label in classes:
        of_class = labels == label
        curves.append((index[of_class], _likelier_others(scores[:, label], of_class, index, whole)))

    def area(weights: Weights) -> Array:
        rows = np.ascontiguousarray(
            weights.astype(whole, copy=False).T
        )  # [examples, resamples]: what follows works on whole rows
        everyone = each * rows.sum(0)
        total, number = np.zeros(len(weights)), np.zeros(len(weights))
        for members, below in curves:
            mine = rows[members]
            count = mine.sum(0)
            pairs = (count * (everyone - count)).astype(float)
            there = pairs > 0
            lost = np.einsum("er,er->r", mine, below(rows))
            total[there] += 1 - lost[there] / (2 * pairs[there])
            number += there
        mean = np.full(len(weights), np.nan)
        np.divide(total, number, out=mean, where=number > 0)
        return mean

    return area


def _likelier_others(scores: Array, of_class: Mask, index: NDArray[np.int64], whole: type[Any]) -> Callable[[Any], Any]:
    """Return a function from weights [examples, resamples] to the sums over j in `_auroc`, [members, resamples].

    A good model puts few others before a member of the class, and then the pairs themselves are visited.
    """
    others = scores[~of_class]
    order = np.argsort(others)
    rest = index[~of_class][order]
    left, right = (np.searchsorted(others[order], scores[of_class], side) for side in _SIDES)
    by = _by_pairs if right.sum() <= MAX_PAIRS_PER_OTHER * len(rest) else _by_sums
    return by(rest, left, right, index[-1] + 1, whole)


def _by_pairs(
    rest: NDArray[np.int64], left: NDArray[np.int64], right: NDArray[np.int64], examples: int, whole: type[Any]
) -> Callable[[Any], Any]:
    """Do it by a sparse matrix [members, examples]: 2 for a likelier other, 1 for one that is as likely."""
    from scipy.sparse import csr_array

    end = right.cumsum()
    place = np.arange(end[-1]) - np.repeat(end - right, right)  # of each pair among the member's own
    twice = np.where(place < np.repeat(left, right), 2, 1).astype(whole)
    pairs = csr_array((twice, rest[place], np.concatenate([[0], end])), shape=(len(right), examples))
    return lambda rows: pairs @ rows


def _by_sums(
    rest: NDArray[np.int64], left: NDArray[np.int64], right: NDArray[np.int64], examples: int, whole: type[Any]
) -> Callable[[Any], Any]:
    """Do it for many pairs: add up the weights of the others in the order of their scores."""

    def below(rows: Any) -> Any:
        sums = np.zeros((len(rest) + 1, rows.shape[1]), whole)
        np.cumsum(rows[rest], axis=0, out=sums[1:])
        return sums[left] + sums[right]

    return below
