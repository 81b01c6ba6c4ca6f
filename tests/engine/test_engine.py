import dataclasses
import os
import signal
import sys

import numpy as np
import pytest
import torch
from torch import nn

from coterie import laws, tree
from coterie.data import from_clients
from coterie.data.minibatches import Plan
from coterie.engine import Engine, choose, chunk_size
from coterie.engine import workers as workers_module
from coterie.engine.choose import shape
from coterie.engine.engine import chunks, in_order
from coterie.engine.workers import fan_out
from coterie.errors import CoterieError
from coterie.experiment.simulation import Simulation
from coterie.local import SGD
from coterie.methods import FedAvg, FedMAP
from coterie.scan import compilations
from coterie.task import Task

needs_fork = pytest.mark.skipif(not workers_module.can_fork(), reason="worker processes need Linux")


def federation(sizes=(10, 40, 3, 25, 25), classes=3):
    draw = np.random.default_rng(0)
    clients = {}
    for i, size in enumerate(sizes):
        x = torch.from_numpy(draw.standard_normal((size, 6)).astype(np.float32))
        clients[f"c{i}"] = (x, torch.from_numpy(draw.integers(classes, size=size)))
    return from_clients(clients, num_classes=classes)


def simulation(method=None, sizes=(10, 40, 3, 25, 25), participants=5, norm=False):
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(8), nn.Dropout(0.3)] if norm else []
    task = Task(nn.Sequential(nn.Linear(6, 8), *middle, nn.ReLU(), nn.Linear(8, 3)), num_classes=3)
    return Simulation.start(method or FedAvg(SGD(0.1)), task, federation(sizes), Plan(4, 2), participants, seed=0)


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
    laws._same(base.state, other.state, "chunking matters", tolerance=1e-6)
    ours, theirs = base.evaluate(2, Engine("loop")), other.evaluate(2, Engine("stacked", chunk=chunk))
    for part in ("validation", "test"):
        for metric, values in ours[part].items():
            np.testing.assert_allclose(values, theirs[part][metric], rtol=1e-5)


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
    laws._same(base.state, other.state, "compiling matters", tolerance=1e-5)


@pytest.mark.parametrize("chunk", [2, 5])
def test_threads_change_no_bit(chunk):
    engines = [Engine("stacked", True, chunk, workers, threads=True) for workers in (1, 2, 3)]
    sims = [simulation(FedMAP(SGD(0.1))) for _ in engines]
    for sim, engine in zip(sims, engines, strict=True):
        for number in (1, 2):
            sim.train(number, engine)
    for sim in sims[1:]:
        laws._same(sims[0].state, sim.state, "threads matter", tolerance=0)
    assert all(not engine._team for engine in engines), "no process was begun"


def test_steps_that_are_repeated_are_shared_out_among_threads(monkeypatch):
    monkeypatch.setattr(sys.modules["coterie.engine.choose"], "cores", lambda: 2)
    sim = simulation()
    options = {"compiled": True, "kinds": ("stacked",), "chunk": 3}
    engines = [pick(sim, workers=workers, **options).engine for workers in (1, 2)]
    assert [(engine.threads, engine.chunk, engine.workers) for engine in engines] == [(True, 5, 1), (True, 5, 2)]
    assert "2 threads" in engines[1].describe()


def test_client_work_runs_on_one_thread_and_the_setting_is_restored():
    seen, before = [], torch.get_num_threads()

    class Watching(FedAvg):
        def local_update(self, task, client, down, batches):
            seen.append(torch.get_num_threads())
            return super().local_update(task, client, down, batches)

    simulation(Watching()).train(1, Engine("loop"))
    assert set(seen) == {1}
    assert torch.get_num_threads() == before


@needs_fork
def test_fan_out_gives_results_in_order_from_several_processes():
    jobs = [lambda n=n: {"n": torch.tensor([n]), "pid": torch.tensor([os.getpid()])} for n in range(40)]
    results = fan_out(jobs, 3)
    assert [int(result["n"]) for result in results] == list(range(40))
    assert {int(result["pid"]) for result in results} >= {os.getpid()}


@needs_fork
def test_a_failing_worker_is_reported_with_its_words():
    def fail():
        if os.getpid() != parent:
            raise RuntimeError("the disk is on fire")
        return torch.zeros(1)

    parent = os.getpid()

    def slow():
        import time

        time.sleep(0.5)  # leaves the other jobs to the workers
        return torch.zeros(1)

    with pytest.raises(CoterieError, match="the disk is on fire"):
        fan_out([slow, fail, fail], 2)


@needs_fork
def test_a_killed_worker_is_reported():
    parent = os.getpid()

    def slow():
        import time

        time.sleep(0.5)
        return torch.zeros(1)

    def die():
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(1)

    with pytest.raises(CoterieError, match="killed by signal 9"):
        fan_out([slow, die], 2)


@needs_fork
def test_no_worker_outlives_an_interrupt(monkeypatch):
    """Ctrl-C while the parent works: the workers are stopped and collected, the scratch folder is removed."""
    children, folders = [], []
    fork, mkdtemp = os.fork, workers_module.tempfile.mkdtemp

    def watched_fork():
        child = fork()
        if child:
            children.append(child)
        return child

    monkeypatch.setattr(os, "fork", watched_fork)
    monkeypatch.setattr(workers_module.tempfile, "mkdtemp", lambda **k: folders.append(mkdtemp(**k)) or folders[-1])

    def interrupt():
        raise KeyboardInterrupt

    def sleep():
        import time

        time.sleep(30)
        return torch.zeros(1)

    with pytest.raises(KeyboardInterrupt):
        fan_out([interrupt, sleep, sleep], 3)
    assert len(children) == 2
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    assert not any(os.path.exists(folder) for folder in folders)


def test_chunk_size_is_bounded_by_memory_and_cache():
    room = 10**9
    assert chunk_size(client_bytes=1000, model_bytes=1000, participants=10, memory=room) == 10
    assert chunk_size(client_bytes=10**6, model_bytes=10, participants=10, memory=3 * 10**6) == 3  # 3, 3, 3 and 1
    assert chunk_size(client_bytes=10**9, model_bytes=10, participants=10, memory=1) == 1
    assert chunk_size(client_bytes=0, model_bytes=400_000, participants=100, memory=room) == 8  # 3.5 MB of models


def test_memory_bounds_the_clients_in_flight():
    seen = []

    class Watching(FedAvg):
        def local_update(self, task, client, down, batches):
            seen.append(1)
            return super().local_update(task, client, down, batches)

    sim = simulation(Watching())
    sim.train(1, Engine("stacked", chunk=2))
    assert len(seen) == 3  # one vectorised call a chunk


def pick(sim, **options):
    fn, ids, rows_of = sim.probe()
    options = {"client_steps": 100, "rounds": 1, "chunk": 5, "workers": 1, **options}
    return choose(fn, sim.federation, ids, rows_of, **options)


def test_auto_measures_both_and_does_not_compile_for_little_work():
    choice = pick(simulation())
    assert set(choice.microseconds) == {"loop", "stacked"}
    fastest = min(choice.microseconds, key=choice.microseconds.get)
    assert choice.engine.kind == fastest
    assert not choice.engine.compiled


def test_auto_does_not_look_twice_at_who_is_hopeless(monkeypatch):
    module = sys.modules["coterie.engine.choose"]  # its function has the same name
    monkeypatch.setattr(module, "compiling_takes", lambda _: float("inf"))
    looks = []
    monkeypatch.setattr(module, "fan_out", lambda jobs, _: looks.append(1) or [jobs[0]()])
    for hopeless, number in ((float("inf"), 2), (0.0, 0)):
        looks.clear()
        monkeypatch.setattr(module, "HOPELESS", hopeless)
        assert set(pick(simulation(), workers=2).microseconds) == {"loop", "stacked"}
        assert len(looks) == number


def test_auto_shares_out_rounds_that_are_long_enough(monkeypatch):
    module = sys.modules["coterie.engine.choose"]
    monkeypatch.setattr(module, "compiling_takes", lambda _: float("inf"))
    monkeypatch.setattr(module, "cores", lambda: 2)
    workers = [pick(simulation(), client_steps=steps, chunk=3, workers=None).engine.workers for steps in (1, 10**6)]
    assert workers == [1, 2]


def test_auto_falls_back_to_the_loop_where_clients_cannot_be_stacked():
    class Unstackable(FedAvg):
        def local_update(self, task, client, down, batches):
            float(batches.count)  # not allowed under vmap
            return super().local_update(task, client, down, batches)

    choice = pick(simulation(Unstackable()))
    assert choice.engine.kind == "loop"
    assert "stacked cannot run this task" in choice.notes[0]


def test_auto_does_not_change_the_state():
    sim = simulation(FedMAP())
    before = tree.clone(sim.state)
    pick(sim)
    laws._same(before, sim.state, "measuring changes the state", tolerance=0)


def test_compiling_falls_back_without_a_compiler(monkeypatch):
    def missing(*args, **kwargs):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", missing)
    method = dataclasses.replace(FedAvg(), optimizer=SGD(0.0625))  # a step that no other test has compiled
    base, other = simulation(method), simulation(method)
    base.train(1, Engine("stacked", chunk=5))
    other.train(1, Engine("stacked", chunk=5, compiled=True))
    laws._same(base.state, other.state, "falling back matters", tolerance=1e-6)


def test_auto_says_that_there_is_no_compiler(monkeypatch):
    def missing(*args, **kwargs):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr("coterie.scan.compile_graph", missing)
    monkeypatch.setattr("coterie.scan._compiled", {})
    choice = pick(simulation(dataclasses.replace(FedAvg(), optimizer=SGD(0.03125))), compiled=True)
    assert "steps cannot be compiled here" in choice.notes[0]


def test_evaluation_of_many_examples_goes_in_pieces(monkeypatch):
    sim = simulation(sizes=(60, 50))
    whole = sim.evaluate(1, Engine("stacked"))
    monkeypatch.setattr("coterie.experiment.simulation.PIECE", 24 * 32 * 4)
    pieces = sim.evaluate(1, Engine("stacked"))
    np.testing.assert_allclose(whole["test"]["loss"], pieces["test"]["loss"], rtol=1e-6)


def test_partial_participation_is_fair_and_does_not_depend_on_the_order():
    sim = simulation(participants=2)
    counts = np.zeros(5)
    for number in range(1, 1001):
        counts[sim.sample(number)] += 1
    # 1,000 draws of 2 in 5: mean 400, standard deviation sqrt(1000 * 0.4 * 0.6) = 15.5
    assert (abs(counts - 400) < 5 * 15.5).all()
    assert all(len(sim.sample(number)) == 2 for number in range(1, 20))


def test_the_shape_of_a_stacked_engine():
    """As many chunks as processes, if there are clients enough; lanes that the cache holds and the sizes can fill."""
    room, sizes = 10**9, [10] * 20
    assert shape(sizes, 1000, 1000, 20, room, 2) == (10, (10, 10))
    assert shape(sizes, 1000, 1000, 20, room, 16) == (4, (4, 4))  # no fewer than four each
    assert shape(sizes, 10**8, 1000, 20, 5 * 10**8, 2) == (5, (5, 5))  # memory for five
    assert shape(sizes, 1000, 400_000, 20, room, 2) == (10, (5, 3))  # 3.5 MB of models, and 1 MB
    skewed = [100, *[10] * 19]
    assert max(shape(skewed, 1000, 1000, 20, room, 1)[1]) <= 6  # of 20: one has a third of all steps
