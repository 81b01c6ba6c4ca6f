import pytest
import torch
from torch import nn

import coterie
from coterie import testing
from coterie.compute.compiled import compilations
from coterie.core import tree
from coterie.core.optimizers import SGD
from coterie.core.precision import BFloat16
from coterie.core.task import Task
from coterie.data import from_clients
from coterie.data.minibatches import Plan
from coterie.engine import Engine
from coterie.experiment.simulation import Simulation
from coterie.methods import FedAvg


def simulation(bf16):
    """Convolutions, BatchNorm and dropout, on images of one channel."""
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(20, 1, 8, 8, generator=draw), torch.randint(3, (20,), generator=draw)) for _ in range(3)]
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(144, 3)
    task = Task(nn.Sequential(*layers), num_classes=3, bf16=bf16)
    return Simulation.start(FedAvg(SGD(0.05)), task, from_clients(clients, num_classes=3), Plan(4, 1), 3, seed=0)


def test_products_are_rounded_and_all_else_is_not():
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(5, 7, generator=draw), torch.randn(7, 6, generator=draw)
    with BFloat16():
        found = [a @ b, torch.matmul(a, b), a.mm(b), nn.functional.linear(a, b.T)]
        total = a + 1e-4
    exact = a.bfloat16().float() @ b.bfloat16().float()
    for each in found:
        assert each.dtype == torch.float32
        torch.testing.assert_close(each, exact.bfloat16().float(), rtol=2**-7, atol=1e-6)
        assert not torch.equal(each, a @ b)
    assert torch.equal(total, a + 1e-4)
    counts = torch.arange(4)
    with BFloat16():
        assert torch.equal(counts @ counts, counts @ counts)  # whole numbers stay what they are


def test_gradients_are_float32_and_those_of_rounded_products():
    task, exact = (Task(nn.Linear(6, 3), num_classes=3, bf16=bf16) for bf16 in (True, False))
    params, batch = exact.init(), testing.batches(1)
    batch = coterie.core.batches.Batch(
        batch.x[batch.index[0, 0]], batch.y[batch.index[0, 0]], batch.mask[0, 0], batch.key[0, 0]
    )
    ours, theirs = (torch.func.grad(lambda p, t=t: t.loss(p, batch)[0])(params) for t in (task, exact))
    for name in params:
        assert ours[name].dtype == torch.float32
        torch.testing.assert_close(ours[name], theirs[name], rtol=0.05, atol=5e-3)
    assert not torch.equal(ours["weight"], theirs["weight"])
    assert torch.equal(task.logits(params, batch.x), exact.logits(params, batch.x))  # evaluation is not narrowed


ENGINES = {"loop": Engine("loop"), "stacked": Engine("stacked", chunk=3)}
COMPILED = {"loop, compiled": Engine("loop", True), "stacked, compiled": Engine("stacked", True, 3)}


@pytest.mark.parametrize("engine", [*ENGINES, *(pytest.param(name, marks=pytest.mark.slow) for name in COMPILED)])
def test_every_engine_trains_in_bf16(engine):
    exact, ours, before = simulation(False), simulation(True), compilations()
    for number in (1, 2):
        exact.train(number, Engine("loop"))
        ours.train(number, (ENGINES | COMPILED)[engine])
    assert compilations() - before == (engine in COMPILED)  # what cannot be compiled would have run without
    start = tree.leaves(simulation(True).state.server)
    moved = gap = 0.0
    for a, b, c in zip(tree.leaves(exact.state.server), tree.leaves(ours.state.server), start, strict=True):
        assert a.dtype == b.dtype
        if a.is_floating_point():
            moved, gap = moved + float((a - c).norm() ** 2), gap + float((a - b).norm() ** 2)
    assert 0 < gap < 0.05**2 * moved  # rounded, and going the same way


def test_a_run_in_bf16_is_about_as_good():
    quick = {"engine": "loop", "compile": False, "workers": 1, "rounds": 4, "report": False, "reference": False}
    exact, ours = (coterie.run("fedavg", "digits", bf16=bf16, **quick) for bf16 in (False, True))
    assert ours.mean("accuracy") == pytest.approx(exact.mean("accuracy"), abs=0.03)
    assert ours.mean("loss") != exact.mean("loss")
    assert all(leaf.dtype == torch.float32 for leaf in tree.leaves(ours.views) if leaf.is_floating_point())
