"""Class weights: how much an example counts in its client's training loss."""

from __future__ import annotations

from dataclasses import replace

import torch

from coterie.core.errors import ConfigError
from coterie.data.federation import Federation


def balanced(federation: Federation) -> Federation:
    """Weight training examples so that every class of a client counts the same: w = n / (number of classes * n_class).

    n and the classes are those of the client's own training examples, so nothing is shared. The mean weight is 1.

    Raises:
        ConfigError: The data has no classes.
    """
    if federation.num_classes is None or federation.y.ndim != 1:
        raise ConfigError([f"class_weights: this is {federation.target.words}, which has no classes to weight"])
    weights = torch.ones(len(federation.y))
    for split in federation.clients.values():
        own = torch.from_numpy(split.train)
        labels = federation.y[own].cpu().long()
        count = torch.bincount(labels, minlength=federation.num_classes)
        weights[own] = len(own) / (int((count > 0).sum()) * count[labels].float())
    return replace(federation, weights=weights.to(federation.y.device))
