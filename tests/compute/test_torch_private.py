"""What private parts of PyTorch are used for, beside compiling."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from coterie.compute.torch_private import count_flops

LATER = """
import sys
import torch
from coterie.compute.torch_private import without_dynamo

def slope():
    return torch.func.grad(lambda x: (x**3).sum())(torch.tensor([1.0, 2.0])).tolist()

with without_dynamo():
    first = slope()
    assert "torch._dynamo" not in sys.modules
assert "_dynamo" not in vars(torch)
with without_dynamo():
    assert callable(torch._dynamo.reset)  # something else that it has: then it is imported
assert vars(torch)["_dynamo"] is sys.modules["torch._dynamo"]
with without_dynamo():
    assert slope() == first == slope() == [3.0, 12.0]
assert callable(torch._dynamo.reset)
"""


def test_a_gradient_does_not_import_what_it_does_not_need() -> None:
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3, bias=False)), (4, 6)),
        (nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(3 * 36, 2)), (2, 2, 8, 8)),
        (nn.TransformerEncoderLayer(16, 2, batch_first=True).train(), (2, 5, 16)),
    ],
)
def test_operations_are_counted_as_by_pytorch(module: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    with FlopCounterMode(display=False) as counter:
        module(x)
    assert count_flops(lambda: module(x)) == counter.get_total_flops() > 0
