"""A step's arithmetic in forms that a processor is faster at, used where C++ repeats the step.

- A step of gradient descent, W - lr (A B + R), where A B is the gradient of a layer's weights and R that of a penalty,
  if there is one, is a product that begins at W - lr R:

      W - lr (A B + R) = (W - lr R) + (-lr A) B

  The product alone and then the difference would write and read a second matrix as large as W.
- A division by a number (of bytes by 255, say) is a multiplication by its reciprocal.

Both round differently, in the last bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten
MIN_NUMBERS = 4_096  # of a matrix: for a small one, a product that begins somewhere costs more than it saves


def rewrite(graph: GraphModule) -> GraphModule:
    """Rewrite the arithmetic of a traced step, in place, and return it."""
    for node in list(graph.graph.nodes):
        if node.target is aten.div.Tensor and isinstance(node.args[1], int | float) and node.args[1]:
            if node.args[0].meta["val"].is_floating_point():
                node.target, node.args = aten.mul.Tensor, (node.args[0], 1.0 / node.args[1])
        elif node.target is aten.sub.Tensor and not node.kwargs:
            _descend(graph.graph, node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _descend(graph: Graph, node: Any) -> None:
    """Replace W - lr (A B + R) by a product that begins at W - lr R, if `node` is that."""
    weight, scaled = node.args
    value = node.meta["val"]
    if value.ndim != 2 or value.numel() < MIN_NUMBERS or value.dtype != torch.float32:
        return
    if not _is_own(scaled, aten.mul.Tensor):
        return
    gradient, rate = scaled.args if _is_number(scaled.args[1]) else scaled.args[::-1]
    if not _is_number(rate):
        return
    product, rest = _product(gradient), None
    if product is None and _is_own(gradient, aten.add.Tensor) and not gradient.kwargs:
        one, other = gradient.args
        product, rest = (_product(one), other) if _product(one) is not None else (_product(other), one)
    if product is None or not all(isinstance(each, Node) and _alike(each, node) for each in (weight, rest or weight)):
        return
    with graph.inserting_before(node):
        if rest is not None:
            weight = graph.call_function(aten.sub.Tensor, (weight, graph.call_function(aten.mul.Tensor, (rest, rate))))
        other_way = graph.call_function(aten.neg.default, (rate,)) if isinstance(rate, Node) else -rate
        first = graph.call_function(aten.mul.Tensor, (product.args[0], other_way))
        new = graph.call_function(aten.addmm.default, (weight, first, product.args[1]))
        new.meta["val"] = value  # of which a next step may be about
    node.replace_all_uses_with(new)


def _product(node: Any) -> Any:
    """The matrix product that `node` is, as it is or turned twice, and that nothing else uses."""
    turned = False
    while _is_own(node, aten.t.default):
        node, turned = node.args[0], not turned
    return node if _is_own(node, aten.mm.default) and not turned else None


def _is_number(rate: Any) -> bool:
    """Tell whether this is a number, or a tensor that holds one: the step size is either."""
    return isinstance(rate, float) or (isinstance(rate, Node) and rate.meta["val"].ndim == 0)


def _is_own(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.target == target and len(node.users) == 1


def _alike(one: Node, other: Node) -> bool:
    return all(getattr(one.meta["val"], key) == getattr(other.meta["val"], key) for key in ("shape", "dtype"))
