"""The hot loop: however it is lifted or compiled, it is the loop over one client's minibatches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from coterie.compute.compiled import compilations, compiling
from coterie.core import tree
from coterie.core.batches import Batch, Batches
from coterie.core.optimizers import SGD
from coterie.core.scan import identity, scan
from coterie.core.task import Task
from coterie.core.training import train
from tests.marks import compiles

POOL = Batches(x=None, y=None, index=0, mask=0, key=0, count=0)  # type: ignore[arg-type]  # one pool for all clients
OWN = Batches(*[0] * 6)  # type: ignore[arg-type]


def make(steps: int, seed: int = 0, padding: int = 0, size: int = 12, batch: int = 3) -> Batches:
    """`steps` minibatches and `padding` masked ones, in one epoch."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(size, 2, generator=generator), torch.randn(size, generator=generator)
    index = torch.rand(1, steps + padding, size, generator=generator).argsort(-1)[..., :batch]
    mask = torch.ones(1, steps + padding, batch)
    mask[:, :, -1] = 0  # one example in each minibatch is padding as well
    mask[:, steps:] = 0
    key = torch.randint(0, 2**62, (1, steps + padding), generator=generator)
    return Batches(x, y, index, mask, key, torch.tensor(float(size)))


def step(carry: Any, aux: Any, batch: Batch) -> Any:
    """A gradient step of least squares, and the number of steps: padding would show in either."""
    w, taken = carry
    error = (batch.x @ w - batch.y) * batch.mask
    return w - aux * error @ batch.x, taken + 1


def start(w: float = 1.0) -> Any:
    return torch.tensor([w, -w]), torch.zeros((), dtype=torch.int64)


def assert_equal(a: Any, b: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def nothing_compiled_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.compute.compiled._compiled", {})


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace steps without compiling them: quick, and as particular about its inputs as machine code is."""

    def compile(graph: Callable[..., Any], example: list[Tensor]) -> tuple[Callable[..., Any], None]:
        def layout(values: Any) -> list[Any]:
            return [(value.shape, value.dtype, value.is_contiguous()) for value in values]

        def run(*values: Tensor) -> Any:
            assert layout(values) == expected
            return graph(*values)

        expected = layout(example)
        return run, None

    monkeypatch.setattr("coterie.compute.compiled.compile_graph", compile)


def test_scan_is_a_loop_over_epochs_and_steps() -> None:
    data = make(6)
    carry = expected = start()
    for t in range(6):
        rows = data.index[0, t]
        expected = step(expected, 0.1, Batch(data.x[rows], data.y[rows], data.mask[0, t], data.key[0, t]))
    assert_equal(scan(step, carry, torch.tensor(0.1), data), expected)
    index, mask, key = (value.reshape(2, 3, *value.shape[2:]) for value in (data.index, data.mask, data.key))
    epochs = data._replace(index=index, mask=mask, key=key)
    assert_equal(scan(step, carry, torch.tensor(0.1), epochs), expected)
    assert_equal(carry, start())


def first_steps(data: Batches, steps: int) -> Batches:
    """Also of stacked clients: [..., epochs, steps, batch]."""
    return data._replace(index=data.index[..., :steps, :], mask=data.mask[..., :steps, :], key=data.key[..., :steps])


def test_fully_masked_steps_leave_the_carry_as_it_is() -> None:
    rate, padded = torch.tensor(0.1), make(4, padding=3)
    after = scan(step, start(), rate, padded)
    assert after[1] == 4
    assert_equal(after, scan(step, start(), rate, first_steps(padded, 4)), tolerance=0)
    for nothing in (make(0, padding=3), padded.epoch(0, 0)):
        assert_equal(scan(step, start(), rate, nothing), start(), tolerance=0)


@pytest.mark.parametrize("pool", ["own", "shared"])
def test_stacked_clients_equal_one_at_a_time(pool: str) -> None:
    clients = [make(4, seed=0, padding=2), make(6, seed=1), make(0, seed=2, padding=6)]
    if pool == "shared":
        clients = [client._replace(x=clients[0].x, y=clients[0].y) for client in clients]
    rates = torch.tensor([0.1, 0.05, 0.2])
    carries = [start(1.0), start(2.0), start(3.0)]
    expected = tree.stack([scan(step, *args) for args in zip(carries, rates, clients, strict=True)])
    stacked = tree.stack(clients)
    if pool == "shared":
        stacked = stacked._replace(x=clients[0].x, y=clients[0].y)
    lifted = vmap(lambda *args: scan(step, *args), in_dims=(0, 0, POOL if pool == "shared" else OWN))
    result = lifted(tree.stack(carries), rates, stacked)
    assert_equal(result, expected)
    assert result[1].tolist() == [4, 6, 0]


def test_stacked_axis_may_be_anywhere() -> None:
    data, carries = make(3), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    result = vmap(lambda w: scan(step, (w, torch.zeros(())), torch.tensor(0.1), data)[0], in_dims=1, out_dims=1)(
        carries
    )
    for i in range(3):
        expected = scan(step, (carries[:, i], torch.zeros(())), torch.tensor(0.1), data)[0]
        assert_equal(result[:, i], expected)


def test_what_starts_alike_for_all_clients_may_end_differently() -> None:
    # Neither carry nor aux has a client axis; only the minibatches have.
    clients = [make(2, seed=3), make(2, seed=4)]
    result = vmap(lambda data: scan(step, start(), torch.tensor(0.1), data))(tree.stack(clients))
    assert_equal(result, tree.stack([scan(step, start(), torch.tensor(0.1), data) for data in clients]))
    assert not torch.equal(result[0][0], result[0][1])


@pytest.mark.parametrize("sizes", [(2, 3), (2, 2)])
@pytest.mark.parametrize("axis", ["outer", "inner", "both"])
def test_nested_vmaps_equal_loops(sizes: tuple[int, int], axis: str) -> None:
    outer, inner = sizes
    shape = {"outer": (outer, 1), "inner": (1, inner), "both": (outer, inner)}[axis]
    rates = 0.1 * torch.rand(shape, generator=torch.Generator().manual_seed(0))
    carries = torch.arange(2.0 * outer * inner).reshape(outer, inner, 2)
    data = tree.stack(
        [tree.stack([make(1 + i + j, 10 * i + j, 3 - i - j) for j in range(inner)]) for i in range(outer)]
    )

    def one(w: Tensor, rate: Tensor, data: Batches) -> Tensor:
        return scan(step, (w, torch.zeros(())), rate, data)[0]

    if axis == "outer":
        nested = vmap(vmap(one, in_dims=(0, None, 0)))(carries, rates[:, 0], data)
    elif axis == "inner":
        nested = vmap(vmap(one), in_dims=(0, None, 0))(carries, rates[0], data)
    else:
        nested = vmap(vmap(one))(carries, rates, data)
    for i in range(outer):
        for j in range(inner):
            rate = rates.expand(outer, inner)[i, j]
            assert_equal(nested[i, j], one(carries[i, j], rate, tree.rows(tree.rows(data, i), j)))


def test_a_step_may_return_its_names_in_another_order() -> None:
    def swap(carry: Any, aux: Any, batch: Batch) -> Any:
        return {"b": carry["b"], "a": carry["a"] + 1}

    carry = {"a": torch.tensor(0.0), "b": torch.tensor(100.0)}
    assert_equal(scan(swap, carry, (), make(3)), {"a": torch.tensor(3.0), "b": torch.tensor(100.0)})


# --- what identifies a step


def closing_over(value: Any) -> Callable[..., Any]:
    def inner(carry: Any) -> Any:
        return carry * value

    return lambda carry, aux, batch: inner(carry)


def keyword_default(value: Any) -> Callable[..., Any]:
    def with_default(carry: Any, aux: Any, batch: Any, *, factor: Any = value) -> Any:
        return carry * factor

    return with_default


def default(value: Any) -> Callable[..., Any]:
    def with_default(carry: Any, aux: Any, batch: Any, factor: Any = value) -> Any:
        return carry * factor

    return with_default


def partial(value: Any) -> Callable[..., Any]:
    return functools.partial(_scaled, factor=value)


def _scaled(carry: Any, aux: Any, batch: Any, factor: Any) -> Any:
    return carry * factor


class Scale:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scale) and self.value == other.value

    def step(self, carry: Any, aux: Any, batch: Any) -> Any:
        return carry * self.value


def method(value: Any) -> Callable[..., Any]:
    return Scale(value).step


@pytest.mark.parametrize("close", [closing_over, default, keyword_default, partial, method])
def test_a_step_is_its_code_and_what_it_closes_over(close: Callable[[Any], Any]) -> None:
    assert identity(close(2.0)) == identity(close(2.0))
    assert hash(identity(close(2.0))) == hash(identity(close(2.0)))
    assert identity(close(2.0)) != identity(close(3.0))
    assert identity(closing_over(SGD(lr=0.1))) == identity(closing_over(SGD(lr=0.1)))
    assert identity(closing_over(SGD(lr=0.1))) != identity(closing_over(SGD(lr=0.2)))


def test_different_code_is_a_different_step() -> None:
    assert identity(lambda carry, aux, batch: carry + 1) != identity(lambda carry, aux, batch: carry + 2)


@pytest.mark.parametrize("close", [closing_over, default, keyword_default, partial])
@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: (1, [t]), lambda t: {"a": {"b": t}}])
def test_closures_over_tensors_are_refused(close: Callable[[Any], Any], wrap: Callable[[Tensor], Any]) -> None:
    with pytest.raises(TypeError, match="through `carry` or `aux`"):
        scan(close(wrap(torch.ones(2))), torch.ones(2), (), make(1))


def test_closures_over_what_cannot_be_hashed_are_refused() -> None:
    with pytest.raises(TypeError, match=r"closes over \[1, 2\], which cannot be hashed"):
        scan(closing_over([1, 2]), torch.ones(2), (), make(1))


# --- compiling


def network() -> Task:
    torch.manual_seed(0)
    return Task(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1)), "regression")


@compiles
def test_compiled_equals_stacked_equals_loop() -> None:
    """The real compiler, on all that a step can have: buffers, dropout, optimiser state, masks, a shared pool."""
    task, optimizer = network(), SGD(lr=0.05, momentum=0.9)
    start = task.init()
    clients = [make(3, seed=0, padding=2, batch=8), make(5, seed=1, batch=8)]
    clients = [client._replace(x=clients[0].x, y=clients[0].y) for client in clients]
    expected = tree.stack([train(task, optimizer, start, client) for client in clients])
    stacked = tree.stack(clients)._replace(x=clients[0].x, y=clients[0].y)
    lifted = vmap(lambda data: train(task, optimizer, start, data), in_dims=(POOL,), randomness="error")
    assert_equal(lifted(stacked), expected)
    with compiling():
        assert_equal(lifted(stacked), expected, tolerance=1e-5)
        assert compilations() == 1
        few = first_steps(stacked, 2)
        compiled = lifted(few)
        assert compilations() == 1
    assert_equal(compiled, lifted(few), tolerance=1e-5)


@compiles
@pytest.mark.usefixtures("tracer")
def test_one_compilation_serves_every_number_of_steps() -> None:
    rate = torch.tensor(0.1)
    for steps, padding in ((1, 0), (5, 0), (2, 3)):
        expected = scan(step, start(), rate, make(steps, padding=padding))
        with compiling():
            assert_equal(scan(step, start(), rate, make(steps, padding=padding)), expected)
        assert compilations() == 1
    with compiling():
        scan(step, start(), rate, make(2, batch=4))  # another shape
    assert compilations() == 2
    scan(step, start(), rate, make(2, batch=5))  # not asked to compile
    with compiling(), compiling(False):
        scan(step, start(), rate, make(2, batch=5))
    assert compilations() == 2


@compiles
@pytest.mark.usefixtures("tracer")
def test_equal_closures_share_a_compilation_and_others_do_not() -> None:
    carry, data = torch.ones(2), make(3)
    with compiling():
        assert_equal(scan(closing_over(2.0), carry, (), data), 8 * carry)
        assert_equal(scan(closing_over(2.0), carry, (), data), 8 * carry)
        assert compilations() == 1
        assert_equal(scan(closing_over(3.0), carry, (), data), 27 * carry)
        assert compilations() == 2
        assert_equal(scan(keyword_default(2.0), carry, (), data), 8 * carry)
        assert_equal(scan(keyword_default(3.0), carry, (), data), 27 * carry)


@compiles
@pytest.mark.usefixtures("tracer")
def test_a_compilation_is_for_one_structure() -> None:
    def named(carry: Any, aux: Any, batch: Batch) -> Any:
        return {name: value + (1 if name == "one" else 10) for name, value in carry.items()}

    zero = torch.zeros(())
    expected = {"one": torch.tensor(2.0), "ten": torch.tensor(20.0)}
    with compiling():
        assert_equal(scan(named, {"one": zero, "ten": zero}, (), make(2)), expected)
        assert_equal(scan(named, {"ten": zero, "one": zero}, (), make(2)), expected)


@compiles
@pytest.mark.usefixtures("tracer")
@pytest.mark.parametrize("stacked", [False, True])
def test_compiled_steps_may_return_another_memory_layout(stacked: bool) -> None:
    def transpose(carry: Tensor, aux: Any, batch: Batch) -> Tensor:
        return carry.T + batch.y.sum()

    data = make(3)

    def run(carry: Tensor) -> Any:
        return scan(transpose, carry, (), data)

    carry = torch.arange(18.0).reshape(2, 3, 3) if stacked else torch.arange(9.0).reshape(3, 3)
    lifted = vmap(run) if stacked else run
    expected = lifted(carry)
    with compiling():
        assert_equal(lifted(carry), expected)


@compiles
@pytest.mark.usefixtures("tracer")
def test_models_in_double_precision_compile() -> None:
    task = Task(nn.Linear(2, 1).double(), "regression")
    data = make(3)
    data = data._replace(x=data.x.double(), y=data.y.double())
    expected = train(task, SGD(), task.init(), data)
    with compiling():
        assert_equal(train(task, SGD(), task.init(), data), expected)


@compiles
@pytest.mark.parametrize("stacked", [False, True])
def test_runs_eagerly_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch, stacked: bool) -> None:
    attempts = []

    def no_compiler(graph: Any, example: Any) -> Any:
        attempts.append(graph)
        raise RuntimeError("no C++ compiler found")

    monkeypatch.setattr("coterie.compute.compiled.compile_graph", no_compiler)
    run = functools.partial(scan, step)
    args: Any = (start(), torch.tensor(0.1), make(3, padding=2))
    if stacked:
        run = vmap(run)
        args = tree.stack([args, (start(2.0), torch.tensor(0.2), make(5, seed=1))])
    expected = run(*args)
    with compiling():
        assert_equal(run(*args), expected)
        assert_equal(run(*args), expected)
    assert compilations() == 0
    assert len(attempts) == 1  # failing is remembered, too


@compiles
def test_a_step_that_declines_runs_as_it_is() -> None:
    """It is the same function, stacked or alone, and nothing is compiled for it."""
    stacked = Batches(*(torch.stack(part) for part in list(zip(make(3, 0), make(3, 1), strict=True))[:6]))
    lr = torch.tensor(0.1)

    def run(compiles: bool) -> Any:
        return vmap(lambda own: scan(step, start(), lr, own, compiles=compiles), in_dims=(OWN,))(stacked)

    before = compilations()
    with compiling():
        found = run(False)
    assert compilations() == before
    with compiling(False):
        assert_equal(found, run(True))
    assert_equal(tree.rows(found, 1), scan(step, start(), lr, make(3, 1), compiles=False))
