"""A step's arithmetic in the forms that a processor is fast at, used where steps are compiled on a CPU.

A step of gradient descent, W - lr (d^T x + r), is done in place: W - lr r, if there is an r, by the compiled part, then
- lr d^T x. The product alone and then the difference would write and read a second matrix as large as W.

Steps between, of which the old value is still needed, are a product that begins at it: W + (-lr d)^T x. With a pull
towards U they begin on the way there: W - lr (d^T x + lambda (W - U)) = W + lr lambda (U - W) + (-lr d)^T x.

A division by a number (of bytes by 255, say) is a multiplication by its reciprocal, which is rounded once more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten
LARGE = 4_096  # numbers in a client's matrix, at least: for a small one, one more operation costs more than it saves


@dataclass(frozen=True)
class Descent:
    """Leaf `at` of the carry, as the graph leaves it, becomes itself + first @ second; output `at` is the first."""

    at: int
    second: int  # among the graph's outputs; below 0, ~second among its inputs, which need not be given back

    def operands(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """leaf, first, second."""
        return inputs[self.at], outputs[self.at], outputs[self.second] if self.second >= 0 else inputs[~self.second]

    def apply(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Tensor:
        leaf, first, second = self.operands(inputs, outputs)
        return leaf.baddbmm_(first, second) if leaf.ndim == 3 else leaf.addmm_(first, second)


def faster_products(graph: GraphModule, num_carry: int) -> tuple[GraphModule, tuple[Descent, ...]]:
    """The same step with its arithmetic rewritten, and what is left to add in place."""
    once(graph.graph)
    for node in graph.graph.nodes:
        divides = node.target is aten.div.Tensor and isinstance(node.args[1], int | float) and node.args[1]
        if divides and node.args[0].meta["val"].is_floating_point():
            node.target, node.args = aten.mul.Tensor, (node.args[0], 1.0 / node.args[1])
    descents = _descents(graph.graph, num_carry)
    graph.graph.eliminate_dead_code()
    _between(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph, descents


def once(graph: Graph) -> None:
    """Computes once what is written more than once: a backward pass uses what the forward pass found, and gradients of
    the same minibatch share its patches."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    # What is changed in place is not what it is written as; our own operations are not about such tensors.
    pure = not any(node.target._schema.is_mutable for node in calls if hasattr(node.target, "_schema"))
    output = next(node for node in graph.nodes if node.op == "output")
    given = {_root(each) for each in output.args[0] if isinstance(each, Node)}  # leaves of a carry have memory each
    known: dict[Any, Node] = {}
    for node in calls:
        if node in given or not (pure or getattr(node.target, "namespace", "") == "coterie"):
            continue
        same = known.setdefault((node.target, str(node.args), str(node.kwargs)), node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


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
            if step.rest is not None:  # the compiler writes it where the leaf is, once that was read for the last time
                rest = graph.call_function(aten.mul.Tensor, (step.rest, step.rate))
                less = graph.call_function(aten.sub.Tensor, (leaf, rest))
                if step.alive is not None:
                    less = graph.call_function(aten.where.self, (step.alive, less, leaf))
                graph.call_function(aten.copy_.default, (leaf, less))
            results[at] = first
        second = _behind(step.second)
        place = ~inputs.index(second) if second in inputs else len(results)
        found.append(Descent(at, place))
        if place >= 0:
            results.append(second)
    output.args = (results,)
    return tuple(found)


def _between(graph: Graph) -> None:
    """Steps of one client's large matrices, as products that begin where the step does."""
    written: dict[Node, Node] = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.target is not aten.sub.Tensor or value is None or value.ndim != 2 or value.numel() < LARGE:
            continue
        step = _difference(node, node.args[0])
        if step is None or {each.meta["val"].dtype for each in (node, node.args[0], step.first)} != {torch.float32}:
            continue
        pull = None if step.rest is None else _pull(step.rest, node.args[0])
        if step.rest is not None and pull is None:
            continue
        with graph.inserting_before(node):
            first = graph.call_function(aten.mul.Tensor, (step.first, -step.rate))
            if pull is None:
                new = graph.call_function(aten.addmm.default, (node.args[0], first, step.second))
            else:
                if pull.end not in written:  # down, once: the compiler would otherwise find it again for every step
                    written[pull.end] = graph.call_function(*_laid_out(pull.end))
                end, share = written[pull.end], step.rate * pull.strength
                new = graph.call_function(_towards(), (node.args[0], end, share, first, step.second))
            for each in (first, new):
                each.meta["val"] = (step.first if each is first else node).meta["val"]
        node.replace_all_uses_with(new)


def _laid_out(node: Node) -> tuple[Any, tuple[Node, Sequence[int]]]:
    from torch._inductor.inductor_prims import force_stride_order  # not earlier: see `machine_code`

    return force_stride_order, (node, node.meta["val"].stride())


class _Pull(NamedTuple):
    """strength * (value - end)."""

    strength: float
    end: Node


def _pull(node: Node, value: Node) -> _Pull | None:
    if node.target is not aten.mul.Tensor or not isinstance(node.args[1], float):
        return None
    apart = cast(Node, node.args[0])
    if apart.target is not aten.sub.Tensor or apart.kwargs or not all(isinstance(each, Node) for each in apart.args):
        return None
    one, end = map(_times_one, apart.args)
    return _Pull(node.args[1], end) if one is value and end.meta["val"].shape == value.meta["val"].shape else None


def _times_one(node: Any) -> Node:
    while node.target is aten.mul.Tensor and node.args[1] == 1.0 and isinstance(node.args[1], float):
        node = node.args[0]
    return cast(Node, node)


@functools.cache
def _towards() -> Any:
    """start + share (end - start) + first second, as an operation: `native` has it as one product."""

    def towards(start: Tensor, end: Tensor, share: float, first: Tensor, second: Tensor) -> Tensor:
        return torch.lerp(start, end, share).addmm_(first, second)

    name = "coterie::towards"
    torch.library.define(name, "(Tensor start, Tensor end, float share, Tensor first, Tensor second) -> Tensor")
    torch.library.impl(name, "CPU", towards)
    torch.library.register_fake(name, lambda start, *_: torch.empty_like(start))
    return torch.ops.coterie.towards.default


class _Step(NamedTuple):
    """leaf - rate * (first @ second + rest), where alive."""

    first: Node
    second: Node
    rest: Node | None
    rate: float
    alive: Node | None


def _step(result: Any, leaf: Node) -> _Step | None:
    alive = None
    if result.target is aten.where.self and result.args[2] is leaf:
        alive, result, _ = result.args
    if result.target is not aten.sub.Tensor or result.args[0] is not leaf or len(result.users) > 1:
        return None
    step = _difference(result, leaf)
    return step and step._replace(alive=alive)


def _difference(result: Any, leaf: Any) -> _Step | None:
    if result.kwargs or not all(isinstance(each, Node) for each in result.args):
        return None
    scaled = result.args[1]
    if scaled.target is not aten.mul.Tensor or not isinstance(scaled.args[1], float) or len(scaled.users) > 1:
        return None
    grad, rest = scaled.args[0], None
    product = _product(grad)
    if product is None and grad.target is aten.add.Tensor and not grad.kwargs and len(grad.users) == 1:
        for one, other in (grad.args, reversed(grad.args)):
            if product is None and isinstance(other, Node) and (product := _product(one)) is not None:
                rest = other
    if product is None or (rest is not None and rest.meta["val"].shape != leaf.meta["val"].shape):
        return None
    first, second = product.args
    return _Step(cast(Node, first), cast(Node, second), rest, scaled.args[1], None)


def _product(node: Any) -> Node | None:
    """The matrix product that `node` shows, if it does."""
    if not isinstance(node, Node):
        return None
    node, turned = _behind(node), False
    while (inner := _turned(node)) is not None:
        node, turned = _behind(inner), not turned
    return node if not turned and node.target in (aten.bmm.default, aten.mm.default) else None


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
