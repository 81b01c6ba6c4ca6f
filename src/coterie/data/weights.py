"""Class weights: what an example counts in its client's training loss."""

from __future__ import annotations

from dataclasses import replace

import torch

from coterie.data.federation import Federation
from coterie.errors import ConfigError


def balanced(federation: Federation) -> Federation:
    """Every class of a client counts the same in its training, w = n / (classes the client has * n_class).

    n are the client's own training examples, so nothing is shared; the mean weight is 1.
    """
    if federation.num_classes is None or federation.y.ndim != 1:
        raise ConfigError(["class_weights: classes are needed to be weighted, but this is a regression"])
    weights = torch.ones(len(federation.y))
    for split in federation.clients.values():
        own = torch.from_numpy(split.train)
        labels = federation.y[own].cpu().long()
        count = torch.bincount(labels, minlength=federation.num_classes)
        weights[own] = len(own) / (int((count > 0).sum()) * count[labels].float())
    return replace(federation, weights=weights.to(federation.y.device))
