"""Engines group clients; what a client computes does not depend on it."""

import dataclasses

import numpy as np
import pytest
import torch

from coterie import testing
from coterie.compute.compiled import compilations
from coterie.core.optimizers import SGD
from coterie.data.minibatches import Plan, draw
from coterie.engine import Engine
from coterie.engine.engine import chunks, in_order
from coterie.engine.process_pool import can_fork
from coterie.methods import FedAvg, FedMAP
from tests.marks import compiles

from .small import federation, simulation

needs_fork = pytest.mark.skipif(not can_fork(), reason="worker processes need Linux")


def test_chunks_hold_as_much_data_each_whatever_the_order():
    data = federation()  # 24, 15, 15, 6 and 1 examples to train on
    groups = chunks(data, [0, 1, 2, 3, 4], 3)
    assert [[len(data.split(i).train) for i in group] for group in groups] == [[24, 6, 1], [15, 15]]
    assert groups == chunks(data, [4, 2, 0, 1, 3], 3)
    assert max(map(len, chunks(data, [0, 1, 2, 3, 4], 2))) == 2
    assert chunks(data, [2, 1, 0], 1) == [[1], [0], [2]]


def test_in_order_undoes_the_grouping():
    rows = [([3, 1], {"a": torch.tensor([3, 1])}), ([2], {"a": torch.tensor([2])})]
    assert in_order(rows, [1, 2, 3])["a"].tolist() == [1, 2, 3]


def test_what_results_have_twice_is_put_in_order_once():
    first, second = torch.tensor([[3.0, 30.0], [1.0, 10.0]]), torch.tensor([[2.0, 20.0]])
    rows = [([3, 1], (first, first.view(2, 2), first.T)), ([2], (second, second.view(1, 2), second.expand(1, 2)))]
    kept, sent, other = in_order(rows, [1, 2, 3])
    assert kept.tolist() == sent.tolist() == [[1, 10], [2, 20], [3, 30]]
    assert kept.data_ptr() == sent.data_ptr()
    assert other.tolist() == [[30, 10], [2, 20], [3, 1]]  # the same memory, read in another way


@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
def test_chunking_does_not_matter(chunk):
    base, other = simulation(), simulation()
    for number in (1, 2):
        base.train(number, Engine("loop"))
        other.train(number, Engine("stacked", chunk=chunk))
    testing.same(base.state, other.state, "chunking matters", tolerance=1e-6)
    ours, theirs = base.evaluate(2, Engine("loop")), other.evaluate(2, Engine("stacked", chunk=chunk))
    for part in ("validation", "test"):
        for metric, values in ours[part].items():
            np.testing.assert_allclose(values, theirs[part][metric], rtol=1e-5)


@compiles
def test_compiled_engine_agrees_fills_up_its_last_chunk_and_compiles_once():
    """Chunks of 2, 2 and 1 clients with different numbers of steps, in two rounds: one compiled step serves all."""
    # No client of one example: normalising a batch of copies of it divides rounding errors by sqrt(eps).
    sizes = (10, 40, 12, 25, 25)
    base, other = simulation(sizes=sizes, norm=True), simulation(sizes=sizes, norm=True)
    before = compilations()
    for number in (1, 2):
        base.train(number, Engine("loop"))
        other.train(number, Engine("stacked", compiled=True, chunk=2))
    assert compilations() == before + 1
    testing.same(base.state, other.state, "compiling matters", tolerance=1e-5)


@pytest.mark.parametrize("chunk", [2, 5])
def test_threads_change_no_bit(chunk):
    engines = [Engine("stacked", True, chunk, workers, threads=True) for workers in (1, 2, 3)]
    sims = [simulation(FedMAP(SGD(0.1))) for _ in engines]
    for sim, engine in zip(sims, engines, strict=True):
        for number in (1, 2):
            sim.train(number, engine)
    for sim in sims[1:]:
        testing.same(sims[0].state, sim.state, "threads matter", tolerance=0)
    assert all(not engine._pool for engine in engines), "no process was begun"


def test_client_work_runs_on_one_thread_and_the_setting_is_restored():
    seen, before = [], torch.get_num_threads()

    class Watching(FedAvg):
        def local_update(self, task, client, down, batches):
            seen.append(torch.get_num_threads())
            return super().local_update(task, client, down, batches)

    simulation(Watching()).train(1, Engine("loop"))
    assert set(seen) == {1}
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=needs_fork)])
def test_the_number_of_threads_is_restored_when_client_work_fails(workers):
    class Failing(FedAvg):
        def local_update(self, task, client, down, batches):
            raise ValueError("no")

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="no"):
            simulation(Failing()).train(1, Engine("loop", workers=workers))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@needs_fork
def test_worker_processes_use_the_examples_of_the_federation_they_are_asked_for():
    """Examples are not sent: the workers were forked with them."""
    data, everyone = federation(), list(range(5))
    doubled = dataclasses.replace(data, x=2 * data.x)

    def total(batches):
        return batches.x[batches.index].sum()

    def totals(engine, of):
        def rows_of(group):
            return (), draw(of, group, Plan(4, 1), seed=0, purpose="minibatches", round=1)

        return in_order(engine.map(total, of, everyone, rows_of, purpose="train"), everyone)

    engine, alone = Engine("loop", workers=2), totals(Engine("loop"), data)
    for of, factor in ((data, 1), (doubled, 2), (data, 1), (doubled, 2)):
        torch.testing.assert_close(totals(engine, of), factor * alone)


def test_memory_bounds_the_clients_in_flight():
    seen = []

    class Watching(FedAvg):
        def local_update(self, task, client, down, batches):
            seen.append(1)
            return super().local_update(task, client, down, batches)

    sim = simulation(Watching())
    sim.train(1, Engine("stacked", chunk=2))
    assert len(seen) == 3  # one vectorised call a chunk


def test_compiling_falls_back_without_a_compiler(monkeypatch):
    def missing(*args, **kwargs):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr("coterie.compute.compiled.compile_graph", missing)
    method = dataclasses.replace(
        FedAvg(), optimizer=SGD(0.0625, momentum=0.0625)
    )  # a step that no other test has compiled
    base, other = simulation(method), simulation(method)
    base.train(1, Engine("stacked", chunk=5))
    other.train(1, Engine("stacked", chunk=5, compiled=True))
    testing.same(base.state, other.state, "falling back matters", tolerance=1e-6)
