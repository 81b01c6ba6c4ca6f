"""A transformer encoder that classifies sequences (Vaswani et al., "Attention Is All You Need", NeurIPS 2017).

    h   = E[tokens] sqrt(dim) + positions                       (`Transformer.forward`; sines and cosines, section 3.5)
    h  <- h + Attention(norm(h));   h <- h + W2 gelu(W1 norm(h))      (`Layer`, `layers` times; normalised first)
    out = head(mean of norm(h) over the real tokens)            (`Transformer.forward`)

    Attention(z) = concat_k softmax(Q_k K_k^T / sqrt(dim / heads) + mask) V_k, times an output matrix   (`Attention`)

Attention is written out in matrix products, so that it stacks under `vmap`, compiles, and drops units by the keys of
`coterie.core.dropout`; PyTorch's fused attention draws its dropout from a global generator. Projections are linear
layers of their own, so that adapters can be put beside each of them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PADDING = 0  # the token that fills short sequences up
FAR_BELOW = -1e9  # a masked score; finite, so that a sequence of nothing but padding has no NaN


def transformer(
    shape: tuple[int, ...],
    outputs: int,
    *,
    dim: int = 64,
    heads: int = 4,
    layers: int = 2,
    hidden: int = 128,
    dropout: float = 0.1,
    vocabulary: int = 10_000,
) -> nn.Module:
    """A transformer encoder for sequences: embeddings, attention layers, the mean over real tokens, a linear head.

    An input is a sequence of token numbers below `vocabulary`, (length,), where 0 is padding; or a sequence of vectors,
    (length, width), where a vector of zeros is padding, and which one linear layer brings to `dim`.
    """
    if len(shape) not in (1, 2):
        raise ValueError(
            f"this network needs a sequence of tokens (length,) or of vectors (length, width), not {shape}"
        )
    if dim % (2 * heads):
        raise ValueError(f"dim = {dim} must be an even multiple of heads = {heads}")
    begin: nn.Module = nn.Embedding(vocabulary, dim) if len(shape) == 1 else nn.Linear(shape[1], dim)
    if isinstance(begin, nn.Embedding):
        nn.init.normal_(begin.weight, std=dim**-0.5)  # times sqrt(dim), that is 1, as large as positions
    return Transformer(begin, [Layer(dim, heads, hidden, dropout) for _ in range(layers)], dim, outputs, dropout)


class Transformer(nn.Module):
    def __init__(self, begin: nn.Module, layers: list[nn.Module], dim: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.begin = begin
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, outputs)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.begin, nn.Embedding):
            x = x.long()
            real = x != PADDING  # [batch, length]
            h = self.begin(x) * math.sqrt(self.head.in_features)
        else:
            real = (x != 0).any(2)
            h = self.begin(x)
        h = self.dropout(h + positions(h.shape[1], h.shape[2], h.device))
        mask = torch.where(real, 0.0, FAR_BELOW)[:, None, None]  # [batch, 1, 1, length]
        for layer in self.layers:
            h = layer(h, mask)
        weight = real[..., None].to(h.dtype)
        mean = (self.norm(h) * weight).sum(1) / weight.sum(1).clamp_min(1)
        found: Tensor = self.head(mean)
        return found


class Layer(nn.Module):
    """h + Attention(norm(h)), and then h + W2 gelu(W1 norm(h))."""

    def __init__(self, dim: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, heads, dropout)
        self.norm2, self.wide, self.narrow = nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        h = h + self.dropout(self.attention(self.norm1(h), mask))
        out: Tensor = h + self.dropout(self.narrow(self.dropout(F.gelu(self.wide(self.norm2(h))))))
        return out


class Attention(nn.Module):
    """Every token looks at all others by each of several heads; `mask` [batch, 1, 1, length] is added to the scores."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.output = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        batch, length, dim = z.shape

        def by_head(projected: Tensor) -> Tensor:  # [batch, heads, length, dim / heads]
            return projected.reshape(batch, length, self.heads, dim // self.heads).transpose(1, 2)

        query, key, value = by_head(self.query(z)), by_head(self.key(z)), by_head(self.value(z))
        scores = query @ key.transpose(2, 3) / math.sqrt(dim // self.heads) + mask
        seen = self.dropout(torch.softmax(scores, 3)) @ value
        out: Tensor = self.output(seen.transpose(1, 2).reshape(batch, length, dim))
        return out


def positions(length: int, dim: int, device: torch.device) -> Tensor:
    """Return [length, dim], a code of each place: sines, then cosines, of wavelengths from 2 pi to 20,000 pi."""
    speed = torch.exp(torch.arange(dim // 2, device=device) * (-2 * math.log(10_000) / dim))
    angle = torch.arange(length, device=device)[:, None] * speed
    return torch.cat([angle.sin(), angle.cos()], 1)
