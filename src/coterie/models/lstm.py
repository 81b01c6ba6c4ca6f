"""An LSTM over embeddings, as plain matrix products.

`nn.LSTM` is one fused operation that `vmap` cannot vectorise over clients. The recurrence written out can be, and so
runs in every engine. Its parameters have the names and shapes of `nn.LSTM`, so weights can be exchanged.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def lstm(
    shape: tuple[int, ...],
    outputs: int,
    *,
    hidden: int = 50,
    layers: int = 2,
    wide: int = 5000,
    vocabulary: int = 10_000,
    dim: int = 50,
) -> nn.Module:
    """pFedBreD's network for Sent140: a two-layer bidirectional LSTM of 50 units, 5000 leaky ReLU units, a linear head.

    An input is a sequence of embeddings, (length, dim), such as the paper's 50-d GloVe vectors, which are not trained;
    or a sequence of word numbers, (length,), for which a table of `vocabulary` embeddings of size `dim` is trained.
    """
    if len(shape) not in (1, 2):
        raise ValueError(
            f"this network needs a sequence of embeddings (length, dim) or of words (length,), not {shape}"
        )
    words = vocabulary if len(shape) == 1 else 0
    return TextClassifier(words, dim if words else shape[1], hidden, layers, wide, outputs)


class TextClassifier(nn.Module):
    """Classifies from the last output and the last layer's final states, in the order of the authors' code."""

    def __init__(self, vocabulary: int, dim: int, hidden: int, layers: int, wide: int, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim) if vocabulary else None
        self.recurrent = LSTM(dim, hidden, layers)
        self.wide = nn.Linear(4 * hidden, wide)
        self.head = nn.Linear(wide, outputs)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x.long())
        out, forward, backward = self.recurrent(x)
        features = torch.cat([out[:, -1], backward, forward], 1)
        found: Tensor = self.head(F.leaky_relu(self.wide(features), 0.1))
        return found


class LSTM(nn.Module):
    """A bidirectional LSTM.

    It maps x [batch, length, dim] to outputs [batch, length, 2 hidden], and the final states of the last layer, forward
    and backward, [batch, hidden] each.
    """

    def __init__(self, dim: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.hidden, self.layers = hidden, layers
        bound = 1 / math.sqrt(hidden)  # as nn.LSTM draws them
        for layer in range(layers):
            width = dim if layer == 0 else 2 * hidden
            for end in ("", "_reverse"):
                for name, size in (("weight_ih", (width,)), ("weight_hh", (hidden,)), ("bias_ih", ()), ("bias_hh", ())):
                    start = torch.empty(4 * hidden, *size).uniform_(-bound, bound)
                    self.register_parameter(f"{name}_l{layer}{end}", nn.Parameter(start))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for layer in range(self.layers):
            forward = self._run(x, f"l{layer}")
            backward = self._run(x.flip(1), f"l{layer}_reverse").flip(1)
            x = torch.cat([forward, backward], 2)
        return x, forward[:, -1], backward[:, 0]

    def _run(self, x: Tensor, name: str) -> Tensor:
        """Return all outputs of one direction, [batch, length, hidden]."""
        own = {part: getattr(self, f"{part}_{name}") for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
        inputs = F.linear(x, own["weight_ih"], own["bias_ih"] + own["bias_hh"])  # for all time steps in one product
        h = c = torch.zeros_like(inputs[:, 0, : self.hidden])
        outputs = []
        for now in inputs.unbind(1):
            i, f, g, o = (now + F.linear(h, own["weight_hh"])).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs, 1)
