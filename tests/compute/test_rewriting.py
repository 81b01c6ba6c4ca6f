"""A step that was rewritten computes the same, with fewer passes over memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from coterie.compute.rewriting import MIN_NUMBERS, rewrite

aten = torch.ops.aten
DRAW = torch.Generator().manual_seed(0)
W, U = (torch.randn(64, 80, generator=DRAW) for _ in range(2))
A, B = torch.randn(64, 7, generator=DRAW), torch.randn(7, 80, generator=DRAW)
SMALL = torch.randn(8, 10, generator=DRAW)


def rewritten(step: Callable[..., Tensor], *given: Tensor) -> tuple[list[Any], Tensor]:
    """The operations of a step after rewriting, and what it then gives."""
    graph = rewrite(make_fx(step)(*given))
    return [node.target for node in graph.graph.nodes if node.op == "call_function"], graph(*given)


@pytest.mark.parametrize(
    "step",
    [
        lambda w, u, a, b: w - 0.1 * (a @ b),
        lambda w, u, a, b: w - (a @ b).t().t() * 0.1,
        lambda w, u, a, b: w - 0.1 * (a @ b + 0.3 * (w - u)),
        lambda w, u, a, b: w - 0.1 * (0.3 * (w - u) + a @ b),
        lambda w, u, a, b: w - u[0, 0] * (a @ b),  # a step size that is a tensor
        lambda w, u, a, b: w - (a @ b + 0.3 * (w - u)) * u[0, 0],
        lambda w, u, a, b: (v := w - 0.1 * (a @ b)) - 0.2 * (a @ (b * v.sum()) + 0.3 * (v - u)),  # two steps
    ],
)
def test_descent_is_one_product(step: Callable[..., Tensor]) -> None:
    assert W.numel() >= MIN_NUMBERS
    operations, found = rewritten(step, W, U, A, B)
    torch.testing.assert_close(found, step(W, U, A, B))
    assert aten.addmm.default in operations
    assert aten.mm.default not in operations


@pytest.mark.parametrize(
    ("step", "given"),
    [
        (lambda w, a, b: w - 0.1 * (a @ b), (SMALL, SMALL[:, :2], SMALL[:2])),  # too small to be worth it
        (lambda w, a, b: w - 0.1 * (a @ b), (W.double(), A.double(), B.double())),
        (lambda w, a, b: torch.stack([w - 0.1 * (g := a @ b), g]), (W, A, B)),  # the gradient is also given back
        (lambda w, a, b: w[0] - 0.1 * (a @ b), (W, A, B)),  # a row for all
        (lambda w, a, b: w - 0.1 * (a @ b) / w.sum(), (W, A, B)),
    ],
)
def test_what_is_no_descent_stays_as_it_is(step: Callable[..., Tensor], given: tuple[Tensor, ...]) -> None:
    operations, found = rewritten(step, *given)
    torch.testing.assert_close(found, step(*given))
    assert aten.addmm.default not in operations


def test_a_division_by_a_number_is_a_multiplication() -> None:
    x = torch.arange(256, dtype=torch.uint8)
    operations, found = rewritten(lambda x: x.float() / 255, x)
    assert aten.div.Tensor not in operations
    torch.testing.assert_close(found, x.float() / 255)
    assert aten.div.Tensor in rewritten(lambda x: x / 255, x)[0], "of whole numbers, the types differ"
