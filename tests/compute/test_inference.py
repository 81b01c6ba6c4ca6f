"""Evaluation with faster layers says what the layers say."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.compute import inference
from coterie.compute.inference import faster_inference


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(64, 256, 16), (63, 256, 16), (100, 784, 10), (100, 784, 17), (220, 784, 100)]
)
def test_linear_layers_agree(rows: int, inputs: int, outputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(inputs, outputs, bias=bias), torch.randn(rows, inputs)
    with faster_inference():
        found = layer(x)
    torch.testing.assert_close(found, layer(x), rtol=1e-5, atol=1e-5)


def test_only_large_layers_are_left_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTERIE_BACKEND", raising=False)
    left: list[torch.Size] = []

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *_: object) -> Tensor:
        left.append(x.shape)
        return torch.zeros(len(x), len(weight))

    monkeypatch.setattr(inference.torch_private, "onednn_linear", lambda: linear)
    rows, weight = inference.MIN_ONEDNN_PRODUCTS // (256 * 64), torch.ones(64, 256)
    x = torch.ones(rows, 256)
    with faster_inference():
        F.linear(x, weight)
        assert left == [x.shape]
        F.linear(x[1:], weight)
        F.linear(x.double(), weight.double())
        F.linear(x[None], weight)
        trained = weight.clone().requires_grad_()
        F.linear(x, trained).sum().backward()  # oneDNN's layer has no derivative
        assert left == [x.shape]
    assert trained.grad is not None
    monkeypatch.setattr(inference.torch_private, "onednn_linear", lambda: None)  # as in another version of PyTorch
    with faster_inference():
        torch.testing.assert_close(F.linear(x, weight), torch.full((rows, 64), 256.0))


def test_networks_agree() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 24 * 24, 3))
    x = torch.randn(70, 1, 28, 28)
    with faster_inference():
        found = net(x)
    torch.testing.assert_close(found, net(x), rtol=1e-5, atol=1e-5)


def test_only_few_outputs_of_many_rows_are_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTERIE_BACKEND", raising=False)
    turned: list[torch.Size] = []

    def addmm(bias: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        turned.append(x.shape)
        return bias + weight @ x

    monkeypatch.setattr(inference.torch, "addmm", addmm)
    wide, narrow, bias = torch.zeros(32, 256), torch.zeros(10, 256), torch.zeros(10)
    with faster_inference():
        F.linear(torch.zeros(64, 256), narrow, bias)
        F.linear(torch.zeros(8, 256), narrow, bias)
        F.linear(torch.zeros(64, 256), wide, torch.zeros(32))
        F.linear(torch.zeros(2, 64, 256), narrow, bias)
    assert turned == [torch.Size([256, 64])]


def test_plain_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_BACKEND", "plain")
    monkeypatch.setattr(inference, "_linear", lambda *_: pytest.fail("not plain"))
    with faster_inference():
        F.linear(torch.zeros(64, 256), torch.zeros(10, 256))
