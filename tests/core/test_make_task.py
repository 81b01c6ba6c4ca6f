"""`make_task`: what is said when a module does not fit; what it refuses of other kinds is tested where they are."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from coterie.core.make_task import make_task


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(body=nn.Linear(4, 5), norm=nn.BatchNorm1d(5), act=nn.Tanh(), head=nn.Linear(5, 3)))


def test_make_task_returns_a_task_that_fits() -> None:
    task = make_task(mlp(), "classification", 3, normal(7, 4), head="body")
    assert (task.kind, task.num_classes, task.head_module) == ("classification", 3, "body")
    assert make_task(nn.Linear(4, 1), "regression", None, normal(7, 4)).num_classes is None


@pytest.mark.parametrize(
    ("module", "num_classes", "width", "message"),
    [
        (mlp(), 3, 6, r"inputs of shape \(6,\)"),
        (mlp(), 5, 4, r"\(2, 3\).*5 classes: its last layer needs 5 outputs"),
        (nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), 2, 4, r"\(2,\).*needs 2 outputs"),
    ],
)
def test_make_task_errors(module: nn.Module, num_classes: int, width: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_task(module, "classification", num_classes, normal(7, width))
