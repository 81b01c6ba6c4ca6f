"""Steps that C++ repeats: the same results as called from Python, and what cannot be repeated is called."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from coterie.compute import compiled
from coterie.compute.compiled import compiling
from coterie.compute.recording import NotReplayable, Recorder, arena_offsets
from coterie.compute.replay import MAX_ARGUMENTS, ReplayedStep, library
from coterie.core import tree
from coterie.core.batches import Batch, Batches
from coterie.core.optimizers import SGD, AdamW
from coterie.core.scan import scan
from coterie.core.task import Task
from coterie.core.training import proximal_steps, quadratic_penalty, train
from coterie.data.federation import from_clients
from coterie.data.minibatches import Plan
from coterie.engine import Engine
from coterie.engine.stacked import stacked
from coterie.experiment.simulation import Simulation
from coterie.methods import FedProx
from coterie.parts.bregman import Quadratic
from tests.marks import compiles

CLIENTS = 3
pytestmark = compiles


@pytest.fixture(autouse=True)
def nothing_compiled_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.compute.compiled._compiled", {})


def replayed_steps() -> list[ReplayedStep | None]:
    return [step.replayed for step in compiled._compiled.values()]


def repeated(recorder: Recorder) -> None:
    """What was watched, once, where it was."""
    row = [recorder.memory[owner].data_ptr() + offset for owner, offset in recorder.operands]
    table, ops = np.array([*row, *[0] * MAX_ARGUMENTS], np.int64), np.array(recorder.ops, np.int64)
    assert library().run(ops.ctypes.data, len(ops), table.ctypes.data) is None


def layouts(*shape: int) -> dict[str, Tensor]:
    """The same shape as it may lie in memory."""
    value = torch.randn(*shape)
    return {
        "rows": value,
        "columns": value.mT.contiguous().mT,
        "part": torch.randn(*shape[:-1], shape[-1] + 3)[..., 2:-1],
    }


@pytest.mark.parametrize(
    "sizes", [(10, 10, 784), (10, 100, 70), (1, 1, 1), (7, 19, 33), (6, 3, 130), (32, 32, 30)], ids=str
)
@pytest.mark.parametrize("start", ["nothing", "itself", "another", "a row"])
def test_products_of_every_size_and_layout(sizes: tuple[int, int, int], start: str) -> None:
    m, n, k = sizes
    torch.manual_seed(0)
    done = 0
    for one, a in layouts(2, m, k).items():
        for other, b in layouts(2, k, n).items():
            for last, c in layouts(2, m, n).items():
                begin = None if start == "nothing" else c if start == "itself" else torch.randn_like(c)
                begin = torch.randn(n) if start == "a row" else begin
                expected = a.double() @ b.double() + (0 if begin is None else begin.double())
                recorder = Recorder([])
                try:
                    recorder.product(a, b, c, begin)
                except NotReplayable:  # a and b would have to be turned, or c
                    turned = {one == "columns", other == "columns"}
                    assert turned == {last != "columns"} or start == "a row"
                    continue
                repeated(recorder)
                torch.testing.assert_close(c.double(), expected, rtol=1e-4, atol=1e-4)
                done += 1
    assert done >= (8 if start == "a row" else 20)


def test_a_product_writes_nothing_beside_its_result() -> None:
    torch.manual_seed(0)
    for m, n in ((3, 5), (5, 64), (11, 70)):
        room = torch.full((m + 2, n + 4), 7.0)
        a, b = torch.randn(m, 9), torch.randn(9, n)
        recorder = Recorder([])
        recorder.product(a, b, room[1:-1, 2:-2])
        repeated(recorder)
        torch.testing.assert_close(room[1:-1, 2:-2], a @ b)
        room[1:-1, 2:-2] = 7.0
        assert bool((room == 7.0).all())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 500)), max_size=12))
def test_what_is_used_at_the_same_time_has_places_apart(spans: list[tuple[int, int, int]]) -> None:
    times = {key: (min(a, b), max(a, b)) for key, (a, b, _) in enumerate(spans)}
    sizes = {key: size for key, (_, _, size) in enumerate(spans)}
    begin = arena_offsets(times, sizes)
    assert begin.keys() == times.keys()
    for one, other in itertools.combinations(times, 2):
        together = times[one][0] <= times[other][1] and times[other][0] <= times[one][1]
        apart = begin[one] + sizes[one] <= begin[other] or begin[other] + sizes[other] <= begin[one]
        assert apart or not together


def test_what_is_used_at_different_times_shares_a_place() -> None:
    assert arena_offsets({0: (0, 1), 1: (1, 2), 2: (2, 3)}, {0: 100, 1: 70, 2: 100}) == {0: 0, 1: 128, 2: 0}


def batches(features: int, steps: int, classes: int = 3, shape: tuple[int, ...] = ()) -> Batches:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, *(shape or (features,)), generator=generator)
    y = torch.randint(0, classes, (40,), generator=generator)
    index = torch.randint(0, 40, (CLIENTS, 1, steps, 6), generator=generator)
    mask = torch.ones(CLIENTS, 1, steps, 6)
    mask[1, :, steps // 2 :] = 0  # one client is used up before the others
    return Batches(x, y, index, mask, torch.zeros(CLIENTS, 1, steps, dtype=torch.int64), torch.full((CLIENTS,), 40))


@pytest.mark.parametrize(
    ("optimizer", "steps", "width", "anchored"),
    [
        (SGD(0.1), 4, None, False),
        (SGD(0.1), 5, None, True),  # an odd number of steps ends in the other place
        (SGD(0.1, momentum=0.9), 5, 2, False),  # two lanes for three clients
        (AdamW(0.01, eps=1e-3), 6, 2, True),
    ],
    ids=str,
)
def test_repeated_training_equals_eager_training(optimizer: Any, steps: int, width: int | None, anchored: bool) -> None:
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.Linear(150, 70), nn.ReLU(), nn.Linear(70, 3)), "classification")
    params = tree.map(lambda leaf: leaf + 0.01 * torch.randn(CLIENTS, *leaf.shape), task.init())
    centre = tree.map(lambda leaf: leaf + 0.1, params)
    before, data = tree.clone(params), batches(150, steps)

    def one(params: Any, centre: Any, data: Batches) -> Any:
        pull = (quadratic_penalty, (centre, torch.tensor(0.5))) if anchored else ()
        return train(task, optimizer, params, data, *pull)

    expected = stacked(one, (params, centre), data)
    with compiling(width=width):
        got, again = (stacked(one, (params, centre), data) for _ in range(2))
    assert all(step is not None for step in replayed_steps())
    assert replayed_steps()
    for ours, theirs, twice in zip(*map(tree.leaves, (got, expected, again)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-5)
        assert torch.equal(ours, twice)  # nothing of the first scan is left in the second
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(params), tree.leaves(before), strict=True))


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_a_client_gets_the_same_bits_whoever_else_is_there_and_however_many_threads(threads: int) -> None:
    """Three clients of 5, 2 and no minibatches; then each alone, and in another order."""
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.Linear(150, 70), nn.ReLU(), nn.Linear(70, 3)), "classification")
    params = tree.map(lambda leaf: leaf + 0.01 * torch.randn(CLIENTS, *leaf.shape), task.init())
    centre, data = tree.map(lambda leaf: leaf[0] + 0.1, params), batches(150, 5)
    data.mask[2] = 0

    def one(params: Any, data: Batches) -> Any:
        return train(task, SGD(0.1, momentum=0.9), params, data, quadratic_penalty, (centre, torch.tensor(0.5)))

    def of(rows: list[int], threads: int) -> list[Tensor]:
        some = Batches(data.x, data.y, *(leaf[rows] for leaf in data[2:6]))
        with compiling(threads=threads):
            return tree.leaves(stacked(one, (tree.rows(params, torch.tensor(rows)),), some))

    whole = of([0, 1, 2], 1)
    assert len(replayed_steps()) == 1
    assert all(torch.equal(leaf[2], before[2]) for leaf, before in zip(whole, tree.leaves(params), strict=False))
    for rows in ([0, 1, 2], [2, 1, 0], [1], [0]):
        found = of(rows, threads)
        assert all(torch.equal(leaf, expected[rows]) for leaf, expected in zip(found, whole, strict=True))
    assert len(replayed_steps()) == 1, "one compiled step serves all of them"


def test_nested_clients_are_repeated() -> None:
    """Several models for each client: the inner axis belongs to the step."""
    torch.manual_seed(0)
    task, data = Task(nn.Linear(150, 3), "classification"), batches(150, 4)
    models = tree.map(lambda leaf: leaf + 0.01 * torch.randn(CLIENTS, 2, *leaf.shape), task.init())

    def one(models: Any, data: Batches) -> Any:
        return torch.func.vmap(lambda model: train(task, SGD(0.1), model, data))(models)

    expected = stacked(one, (models,), data)
    with compiling(threads=2):
        got = stacked(one, (models,), data)
    assert all(step is not None for step in replayed_steps())
    for ours, theirs in zip(tree.leaves(got), tree.leaves(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-5)


def test_minibatches_of_inner_clients_may_lie_anyhow() -> None:
    def step(carry: Any, aux: Any, batch: Batch) -> Any:
        return carry + (batch.x.sum(1) * batch.mask).sum()

    data = batches(4, 5)
    index = torch.randint(0, 40, (CLIENTS, 2, 1, 5, 6), generator=torch.Generator().manual_seed(1))
    mask, key = torch.ones(index.shape), torch.zeros(index.shape[:-1], dtype=torch.int64)

    def of(carry: Any, index: Any, mask: Any, key: Any) -> Any:
        return scan(step, carry, (), Batches(data.x, data.y, index, mask, key, torch.tensor(1.0)))

    start = torch.zeros(CLIENTS, 2)
    expected = torch.func.vmap(torch.func.vmap(of))(start, index, mask, key)
    last = (index.movedim(1, -1).contiguous(), mask.movedim(1, -1).contiguous(), key.movedim(1, -1).contiguous())
    with compiling(threads=2):
        got = torch.func.vmap(torch.func.vmap(of, in_dims=(0, 3, 3, 2)))(start, *last)
    torch.testing.assert_close(got, expected)


def test_scans_in_several_python_threads_wait_for_each_other() -> None:
    torch.manual_seed(0)
    task, data = Task(nn.Linear(150, 3), "classification"), batches(150, 4)
    params = tree.map(lambda leaf: leaf + 0.01 * torch.randn(CLIENTS, *leaf.shape), task.init())

    def one(params: Any, data: Batches) -> Any:
        return train(task, SGD(0.1), params, data)[0]

    def trained() -> list[Tensor]:
        with compiling(threads=2):
            return tree.leaves(stacked(one, (params,), data))

    expected, stop = trained(), threading.Event()

    def busy() -> None:  # small arrays come and go
        while not stop.is_set():
            np.full(9, 77)

    with ThreadPoolExecutor(3) as pool:
        pool.submit(busy)
        try:
            found = [each.result() for each in [pool.submit(trained) for _ in range(60)]]
        finally:
            stop.set()
    assert all(torch.equal(a, b) for each in found for a, b in zip(each, expected, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
def test_proximal_steps_of_one_client_equal_eager_ones(threads: int) -> None:
    """Products that begin on the way to the centre; C++ repeats them where there are no threads to share the work."""
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.Linear(150, 70), nn.ReLU(), nn.Linear(70, 3)), "classification")
    centre, data = tree.map(lambda leaf: leaf + 0.1, task.init()), batches(150, 5)
    alone = Batches(data.x, data.y, *(leaf[0] for leaf in data[2:6]))

    def step(carry: Any, aux: Any, batch: Batch) -> Any:
        return proximal_steps(task, SGD(0.1), carry, batch, partial(Quadratic().divergence_gradient, 0.5), aux, 3)[0]

    expected = scan(step, task.init(), centre, alone)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with compiling():
            got = scan(step, task.init(), centre, alone)
    finally:
        torch.set_num_threads(before)
    assert [step is not None for step in replayed_steps()] == [threads == 1]
    for ours, theirs in zip(tree.leaves(got), tree.leaves(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-5)


def test_a_convolution_is_called() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, 3))
    task, data = Task(net, "classification"), batches(0, 3, shape=(4, 8, 8))
    alone = Batches(data.x, data.y, *(leaf[0] for leaf in data[2:6]))
    expected = train(task, SGD(0.1), task.init(), alone)
    with compiling():
        got = train(task, SGD(0.1), task.init(), alone)
    assert replayed_steps() == [None]
    for ours, theirs in zip(tree.leaves(got), tree.leaves(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_carry_that_changes_places_is_called() -> None:
    def step(carry: Any, aux: Any, batch: Batch) -> Any:
        one, other = carry
        return other, one + batch.x.sum()

    data = batches(4, 5)
    alone = Batches(data.x, data.y, *(leaf[0] for leaf in data[2:6]))
    start = (torch.zeros(()), torch.ones(()))
    expected = scan(step, start, (), alone)
    with compiling():
        torch.testing.assert_close(scan(step, start, (), alone), expected)


def test_what_is_no_kernel_is_called() -> None:
    """A sort is PyTorch's own: the step is compiled all the same."""

    def step(carry: Any, aux: Any, batch: Batch) -> Any:
        return carry + batch.x.sort(0).values[0].sum()

    data = batches(4, 5)
    alone = Batches(data.x, data.y, *(leaf[0] for leaf in data[2:6]))
    expected = scan(step, torch.zeros(()), (), alone)
    with compiling():
        torch.testing.assert_close(scan(step, torch.zeros(()), (), alone), expected)
    assert replayed_steps() == [None]
    assert all(step.run is not None for step in compiled._compiled.values())


def test_what_goes_wrong_in_a_kernel_is_raised() -> None:
    """A label that is no class: C++ must not end the process."""
    torch.manual_seed(0)
    task, data = Task(nn.Linear(150, 3), "classification"), batches(150, 3)
    params = tree.map(lambda leaf: leaf.expand(CLIENTS, *leaf.shape), task.init())

    def one(params: Any, data: Batches) -> Any:
        return train(task, SGD(0.1), params, data)

    with compiling():
        stacked(one, (params,), data)
        assert all(step is not None for step in replayed_steps())
        with pytest.raises((RuntimeError, IndexError)):
            stacked(one, (params,), data._replace(y=data.y + 7))


def test_other_numbers_are_called() -> None:
    with pytest.raises(NotReplayable):
        Recorder([]).product(*(torch.zeros(2, 2, dtype=torch.float64) for _ in range(3)))
    with pytest.raises(NotReplayable):
        Recorder([torch.zeros(0), torch.zeros(0)])


def test_a_step_that_begins_at_its_anchor_is_repeated() -> None:
    """FedProx's start and anchor are the same memory in every step's example."""
    draw = torch.Generator().manual_seed(0)
    data = {f"{i}": (torch.randn(20, 6, generator=draw), torch.arange(20) % 3) for i in range(CLIENTS)}
    federation = from_clients(data)
    method, task = FedProx(optimizer=SGD(0.1)), Task(nn.Linear(6, 3), num_classes=3)
    sims = [Simulation.start(method, task, federation, Plan(batch_size=8), CLIENTS, seed=0) for _ in range(2)]
    sims[0].train(1, Engine("stacked", chunk=CLIENTS))
    sims[1].train(1, Engine("stacked", chunk=CLIENTS, compiled=True, threads=True))
    assert replayed_steps()
    assert None not in replayed_steps()
    for a, b in zip(tree.leaves(sims[0].state), tree.leaves(sims[1].state), strict=True):
        torch.testing.assert_close(a, b)
