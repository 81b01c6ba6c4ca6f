"""The outputs of every client's model on its test examples, from which all metrics and their intervals follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.core.errors import DataError


class Predictions(NamedTuple):
    """Outputs and targets of all clients' test examples, concatenated in the order of the clients."""

    outputs: Tensor  # [examples, classes] (or what the model gives: [examples, classes, ...], [examples, targets])
    y: Tensor  # [examples, ...]
    owner: Tensor  # [examples] int64: the client's index

    def of(self, client: int) -> Predictions:
        """Return the predictions of one client."""
        begin, end = torch.searchsorted(self.owner, torch.tensor([client, client + 1])).tolist()
        return Predictions(*(part[begin:end] for part in self))


def check_same_data(runs: Mapping[str, tuple[list[str], Predictions]]) -> None:
    """Raise `DataError` unless all runs, (client names, predictions) by label, have the same test examples."""
    (first, (names, ours)), *rest = runs.items()
    for label, (others, theirs) in rest:
        if names != others:
            only = sorted(set(names) ^ set(others)) or ["their order"]
            difference = f"the clients differ ({', '.join(only[:5])}{', ...' if len(only) > 5 else ''})"
        elif not torch.equal(ours.owner, theirs.owner):
            client = next(i for i in range(len(names)) if (ours.owner == i).sum() != (theirs.owner == i).sum())
            difference = f"client '{names[client]}' has a different number of test examples"
        elif ours.y.shape != theirs.y.shape or not _equal(ours.y, theirs.y):
            difference = "the labels of the test examples differ"
        else:
            continue
        raise DataError(
            f"{first} and {label} do not use the same data: {difference}. Compare runs with the same data, validation "
            "and test shares, and seed."
        )


def _equal(a: Tensor, b: Tensor) -> bool:
    """Tell whether targets are equal; one that is missing (NaN) is equal to another that is."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
