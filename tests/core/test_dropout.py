"""Keyed dropout: the statistics of dropout, as a function of a key."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from coterie.core.batches import Batch
from coterie.core.dropout import KeyedDropout, uniform
from coterie.core.task import Task
from coterie.data import from_clients
from coterie.data.minibatches import Plan
from coterie.engine import Engine
from coterie.experiment.simulation import Simulation
from coterie.methods import FedAvg

KEYS = torch.randint(0, 2**62, (50,), generator=torch.Generator().manual_seed(0))


def drop(module: nn.Module, x: Tensor, key: Tensor = KEYS[0]) -> Tensor:
    with KeyedDropout(key):
        return module(x)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_rate_and_scale(p: float) -> None:
    x = torch.full((100, 200), 3.0)
    out = drop(nn.Dropout(p), x)
    assert out.unique().tolist() == pytest.approx([0, 3 / (1 - p)])
    sigma = (p * (1 - p) / x.numel()) ** 0.5
    assert (out == 0).float().mean().item() == pytest.approx(p, abs=4 * sigma)
    # No unit and no example is special: each rate is within 5 of its own standard deviations.
    for axis, size in ((0, 100), (1, 200)):
        assert ((out == 0).float().mean(axis) - p).abs().max() < 5 * (p * (1 - p) / size) ** 0.5


def test_uniform_is_uniform() -> None:
    u = torch.stack([uniform(key, (400,)) for key in KEYS])
    assert u.min() >= 0
    assert u.max() < 1
    cells = torch.histc(u, bins=20, min=0, max=1)
    expected = u.numel() / 20
    assert ((cells - expected) ** 2 / expected).sum() < 43.8  # chi-squared, 19 degrees of freedom, p = 0.001


def test_none_and_all_dropped() -> None:
    x = torch.ones(3, 4)
    assert torch.equal(drop(nn.Dropout(0.0), x), x)
    assert torch.equal(drop(nn.Dropout(1.0), x), torch.zeros(3, 4))


def test_mask_is_a_function_of_the_key_alone() -> None:
    x, module = torch.ones(20, 20), nn.Dropout(0.5)
    torch.manual_seed(1)
    first = drop(module, x)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(drop(module, x), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert len({tuple(drop(module, x, key).flatten().tolist()) for key in KEYS}) == len(KEYS)


def test_calls_of_one_forward_pass_differ() -> None:
    x = torch.ones(100, 100)
    with KeyedDropout(KEYS[0]):
        masks = [F.dropout(x) > 0 for _ in range(3)]
    for i, a in enumerate(masks):
        for b in masks[:i]:  # independent masks of rate 1/2 agree in half of all places
            assert (a == b).float().mean().item() == pytest.approx(0.5, abs=4 * 0.5 / 100)


@pytest.mark.parametrize(
    ("module", "shape"),
    [(nn.Dropout1d(), (30, 40, 5)), (nn.Dropout2d(), (30, 40, 5, 4)), (nn.Dropout3d(), (30, 40, 2, 3, 4))],
)
def test_whole_channels_are_dropped(module: nn.Module, shape: tuple[int, ...]) -> None:
    out = drop(module, torch.ones(shape)).flatten(2)
    assert torch.equal(out, out[..., :1].expand_as(out))
    # Neither whole examples nor the same channels of all examples.
    assert out.std(1).min() > 0
    assert out.std(0).min() > 0


@pytest.mark.filterwarnings("ignore:dropout2d")
@pytest.mark.parametrize("shape", [(30, 40), (30, 40, 5)])
def test_dropout2d_reads_fewer_axes_as_pytorch_does(shape: tuple[int, ...]) -> None:
    # PyTorch takes the second axis for channels, also in [batch, units] and [batch, channels, length].
    out = drop(nn.Dropout2d(), torch.ones(shape)).reshape(30, 40, -1)
    assert torch.equal(out, out[..., :1].expand_as(out))
    assert out.std(1).min() > 0
    assert out.std(0).min() > 0


def test_stacked_keys_equal_one_at_a_time() -> None:
    x = torch.randn(len(KEYS), 3, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    module = nn.Sequential(nn.Dropout(0.3), nn.Dropout2d(0.4))
    stacked = vmap(lambda x, key: drop(module, x, key), randomness="error")(x, KEYS)
    assert torch.equal(stacked, torch.stack([drop(module, *pair) for pair in zip(x, KEYS, strict=True)]))


def test_gradient_passes_where_kept() -> None:
    x = torch.ones(10, 10, requires_grad=True)
    out = drop(nn.Dropout(0.5), x)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], out.detach())


def test_a_task_drops_in_training_only() -> None:
    task = Task(nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 2)))
    params, x, y = task.init(), torch.ones(3, 6), torch.tensor([0, 1, 0])
    assert torch.equal(task.logits(params, x), task.logits(params, x))
    expected = F.linear(F.linear(x, params["0.weight"], params["0.bias"]), params["2.weight"], params["2.bias"])
    torch.testing.assert_close(task.logits(params, x), expected)
    loss, again, other = (task.loss(params, Batch(x, y, torch.ones(3), key))[0] for key in KEYS[[0, 0, 1]])
    assert loss == again
    assert loss != other
    assert loss != task.losses(params, x, y).mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(6, 6, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0].mean(1)


@pytest.mark.parametrize(
    "module",
    [nn.Sequential(nn.Flatten(), nn.Linear(30, 6), nn.AlphaDropout(0.5)), Recurrent()],
    ids=lambda module: type(module).__name__,
)
def test_layers_with_randomness_of_their_own_run_one_client_at_a_time(module: nn.Module) -> None:
    """They draw from PyTorch's global generator: the loop engine seeds it for each client, stacking would mix it up."""
    clients = [
        (torch.randn(12, 5, 6, generator=torch.Generator().manual_seed(i)), torch.arange(12) % 3) for i in (0, 1)
    ]
    federation = from_clients(clients)
    runs = []
    for engine in (Engine("loop"), Engine("loop", workers=2), Engine("loop", compiled=True)):
        sim = Simulation.start(FedAvg(), Task(module, num_classes=3), federation, Plan(4), 2, seed=0)
        sim.train(1, engine)
        runs.append(sim.state.server)
    for other in runs[1:]:
        assert all(torch.equal(runs[0][name], value) for name, value in other.items())
    with pytest.raises(RuntimeError, match=r"vmap|[Bb]atching"):
        sim.train(2, Engine("stacked"))
