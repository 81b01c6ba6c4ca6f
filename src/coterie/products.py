"""Matrix products in the forms that a processor is fast at, used where steps are compiled.

A linear layer computes x W^T with few rows in x (a minibatch) and a large W. For stacked clients that product runs at a
third of the speed of (W x^T)^T with x^T laid out anew, and laying it out costs a tenth of what it saves.

A step of gradient descent, W - lr d^T x, is one operation in place, where the product alone and then the difference
would write and read a second matrix as large as W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._inductor.inductor_prims import force_stride_order
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten
# Bounds of what was tried (20 x 784 x 100 and like it), not measured break-even points.
LONG = 128  # features that are summed over, at least
ROWS = 64  # examples, at most
LARGE = 16_384  # numbers in a client's matrix, at least: for a small one, one more operation costs more than it saves


@dataclass(frozen=True)
class Descent:
    """Leaf `at` of the carry becomes itself plus first @ second: output `at` of the graph, and `second`."""

    at: int
    second: int  # among the graph's outputs; below 0, ~second among its inputs, which need not be given back

    def apply(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Tensor:
        leaf, first = inputs[self.at], outputs[self.at]
        second = outputs[self.second] if self.second >= 0 else inputs[~self.second]
        return leaf.baddbmm_(first, second) if leaf.ndim == 3 else leaf.addmm_(first, second)


def faster_products(graph: GraphModule, num_carry: int) -> tuple[GraphModule, tuple[Descent, ...]]:
    """The same step with its products rewritten, and what of its carry is left to be added in place."""
    for node in list(graph.graph.nodes):
        if node.target is aten.bmm.default:
            _weight_first(graph.graph, node)
    descents = _descents(graph.graph, num_carry)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph, descents


def _weight_first(graph: Graph, node: Node) -> None:
    """x W^T as (W x^T)^T."""
    x, second = (_behind(each) for each in node.args)
    turned = _turned(second)
    if turned is None or not (weight := _behind(turned)).meta["val"].is_contiguous():
        return
    (_, rows, long), wide = x.meta["val"].shape, weight.meta["val"].shape[1]
    if long < LONG or rows > ROWS or wide <= rows:
        return
    with graph.inserting_before(node):
        across = graph.call_function(aten.transpose.int, (x, 1, 2))
        # `clone` and `contiguous` leave the layout to the compiler, which would keep that of x
        laid = graph.call_function(force_stride_order, (across, (long * rows, rows, 1)))
        product = graph.call_function(aten.bmm.default, (weight, laid))
        back = graph.call_function(aten.transpose.int, (product, 1, 2))
        back = graph.call_function(force_stride_order, (back, (rows * wide, wide, 1)))
    back.meta = dict(node.meta)
    node.replace_all_uses_with(back)


def _descents(graph: Graph, num_carry: int) -> tuple[Descent, ...]:
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output")
    carry, results = inputs[:num_carry], list[Any](output.args[0])
    shown = [_root(result) for result in results]
    found = []
    for at, leaf in enumerate(carry):
        shape = leaf.meta["val"].shape
        # What is changed in place must not be shown elsewhere in the new carry: there, the old value is meant.
        if len(shape) not in (2, 3) or shape[-2:].numel() < LARGE or leaf in shown:
            continue
        step = _step(results[at], leaf)
        if step is None or _root(step.second) in carry:
            continue
        with graph.inserting_before(output):
            first = graph.call_function(aten.mul.Tensor, (step.first, -step.rate))
            if step.alive is not None:  # a client whose minibatches are used up stays where it is
                first = graph.call_function(aten.where.ScalarOther, (step.alive, first, 0.0))
        second = _behind(step.second)
        place = ~inputs.index(second) if second in inputs else len(results)
        found.append(Descent(at, place))
        results[at] = first
        if place >= 0:
            results.append(second)
    output.args = (results,)
    return tuple(found)


class _Step(NamedTuple):
    """leaf - rate * first @ second, where alive."""

    first: Node
    second: Node
    rate: float
    alive: Node | None


def _step(result: Any, leaf: Node) -> _Step | None:
    alive = None
    if result.target is aten.where.self and result.args[2] is leaf:
        alive, result, _ = result.args
    if result.target is not aten.sub.Tensor or result.args[0] is not leaf or result.kwargs or len(result.users) > 1:
        return None
    scaled = result.args[1]
    if scaled.target is not aten.mul.Tensor or not isinstance(scaled.args[1], float) or len(scaled.users) > 1:
        return None
    product, turned = _behind(scaled.args[0]), False
    while (inner := _turned(product)) is not None:
        product, turned = _behind(inner), not turned
    if turned or product.target not in (aten.bmm.default, aten.mm.default):
        return None
    first, second = product.args
    return _Step(cast(Node, first), cast(Node, second), scaled.args[1], alive)


def _behind(node: Any) -> Node:
    """The node that this one shows unchanged."""
    while node.target in (aten.view.default, aten.expand.default, aten._unsafe_view.default):
        before = node.args[0]
        if before.meta["val"].shape != node.meta["val"].shape:
            break
        node = before
    return cast(Node, node)


def _root(node: Any) -> Node:
    """The node whose memory this one may show."""
    while node.op == "call_function" and getattr(node.target, "is_view", False):
        node = node.args[0]
    return cast(Node, node)


def _turned(node: Any) -> Node | None:
    """What `node` is the transpose of, over the last two axes."""
    if node.target is aten.t.default or (
        node.target is aten.transpose.int and {axis % 3 for axis in node.args[1:]} == {1, 2}
    ):
        return cast(Node, node.args[0])
    return None
