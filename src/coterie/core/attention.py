"""PyTorch's attention in matrix products, so that it stacks and compiles, and its dropout can have keys.

    attention(Q, K, V) = dropout(softmax(Q K^T / sqrt(d) + mask)) V

`F.scaled_dot_product_attention` is one fused operation. `vmap` has no rule for it and calls it client after client; and
since it may drop units, it counts as one that draws random numbers, so no step with it is compiled.
`nn.MultiheadAttention` and `nn.TransformerEncoder` end there, too. `in_products` gives what to call instead.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Drop = Callable[..., Tensor]  # what stands for `F.dropout`
ATTENTION = {F.scaled_dot_product_attention, F.multi_head_attention_forward}


class AttentionInProducts(TorchFunctionMode):
    """A context in which attention is written out; nothing is dropped. It also keeps layers off their fused paths."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (in_products(func, F.dropout) if func in ATTENTION else func)(*args, **(kwargs or {}))


def in_products(func: Callable[..., Any], drop: Drop) -> Callable[..., Any]:
    """Return what computes the same as an attention function of PyTorch.

    Args:
        func: one of `ATTENTION`.
        drop: what drops attention weights, as `drop(weights, p=...)`.
    """
    if func is F.scaled_dot_product_attention:
        return functools.partial(attention, drop)
    # It is PyTorch's own function, in which two names stand for others.
    mine = {"scaled_dot_product_attention": functools.partial(attention, drop), "dropout": drop}
    names = {**vars(F), **mine, "has_torch_function": lambda tensors: False}
    code, defaults = F.multi_head_attention_forward.__code__, F.multi_head_attention_forward.__defaults__
    return types.FunctionType(code, names, argdefs=defaults)


def attention(
    drop: Drop,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Do what `F.scaled_dot_product_attention` does; what may look at nothing gets zeros."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(groups, -3) for each in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -torch.inf)
    if attn_mask is None:
        weights = torch.softmax(scores, -1)
    else:
        scores = scores + attn_mask
        blind = (scores == -torch.inf).all(-1, keepdim=True)
        weights = torch.softmax(torch.where(blind, 0.0, scores), -1)
        weights = torch.where(blind, 0.0, weights)
    return (drop(weights, p=dropout_p) if dropout_p else weights) @ value
