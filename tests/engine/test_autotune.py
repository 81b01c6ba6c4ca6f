"""`auto` picks an engine by a short measurement."""

import dataclasses
import sys

import pytest

from coterie import testing
from coterie.core import tree
from coterie.core.optimizers import SGD
from coterie.engine import Probe, choose, chunk_size
from coterie.engine.autotune import shape
from coterie.methods import FedAvg, FedMAP
from tests.marks import compiles

from .small import simulation


@pytest.fixture(autouse=True)
def nothing_compiled_yet(monkeypatch):
    """What is compiled already is taken without measuring anything."""
    monkeypatch.setattr("coterie.compute.compiled._compiled", {})


def pick(sim, **options):
    fn, ids, rows_of = sim.probe()
    options = {"client_steps": 100, "rounds": 1, "chunk": 5, "workers": 1, **options}
    return choose(Probe(fn, sim.federation, ids, rows_of), **options)


def shared(test):
    """Mark tests that compile the same step, in one process and once."""
    return compiles(pytest.mark.xdist_group("autotune")(pytest.mark.usefixtures("compiled_once")(test)))


@shared
def test_steps_that_are_repeated_are_shared_out_among_threads(monkeypatch):
    monkeypatch.setattr(sys.modules["coterie.engine.autotune"], "cores", lambda: 2)
    sim = simulation()
    options = {"compiled": True, "kinds": ("stacked",), "chunk": 3}
    engines = [pick(sim, workers=workers, **options).engine for workers in (1, 2)]
    assert [(engine.threads, engine.chunk, engine.workers) for engine in engines] == [(True, 5, 1), (True, 5, 2)]
    assert "2 threads" in engines[1].describe()


@shared
def test_auto_takes_steps_that_are_on_disk_as_they_are(monkeypatch):
    monkeypatch.setattr(sys.modules["coterie.engine.autotune"], "cores", lambda: 2)
    little = {"compiled": None, "workers": None, "chunk": 3}
    assert not pick(simulation(), **little).engine.compiled  # too little work to compile anything
    assert pick(simulation(), **{**little, "compiled": True}).engine.compiled
    monkeypatch.setattr("coterie.compute.compiled._compiled", {})  # as in another process
    choice = pick(simulation(), **little)
    assert set(choice.microseconds) == {"stacked, compiled"}
    assert (choice.engine.compiled, choice.engine.threads, choice.status.path) == (True, True, "replayed")
    assert not pick(simulation(), **{**little, "compiled": False}).engine.compiled
    monkeypatch.setattr("coterie.compute.compiled._compiled", {})
    monkeypatch.setenv("COTERIE_BACKEND", "plain")
    assert not pick(simulation(), **little).engine.compiled


def test_chunk_size_is_bounded_by_memory_and_cache():
    room = 10**9
    assert chunk_size(client_bytes=1000, model_bytes=1000, participants=10, memory=room) == 10
    assert chunk_size(client_bytes=10**6, model_bytes=10, participants=10, memory=3 * 10**6) == 3  # 3, 3, 3 and 1
    assert chunk_size(client_bytes=10**9, model_bytes=10, participants=10, memory=1) == 1
    assert chunk_size(client_bytes=0, model_bytes=400_000, participants=100, memory=room) == 8  # 3.5 MB of models


def test_auto_measures_both_and_does_not_compile_for_little_work():
    choice = pick(simulation())
    assert set(choice.microseconds) == {"loop", "stacked"}
    fastest = min(choice.microseconds, key=choice.microseconds.get)
    assert choice.engine.kind == fastest
    assert not choice.engine.compiled


@compiles
def test_auto_does_not_compile_what_is_faster_in_another_way():
    asked = []

    def otherwise():
        asked.append("how long?")
        return 0.0

    assert not pick(simulation(), client_steps=10**9, compiled=None, otherwise=otherwise).engine.compiled
    assert asked == ["how long?"]
    pick(simulation(), client_steps=1, compiled=None, otherwise=otherwise)
    assert len(asked) == 1  # where compiling does not seem to pay, nobody asks


def test_auto_looks_at_the_clients_with_most_steps(monkeypatch):
    """A client of a single step would tell what a call costs, not what a step does."""
    module, looked = sys.modules["coterie.engine.autotune"], []
    look = module._Look.__init__
    monkeypatch.setattr(module._Look, "__init__", lambda self, *args: look(self, *args) or looked.append(self))
    sim = simulation(sizes=(5, 12, 40, 7, 33, 21, 60), participants=7)
    pick(sim, chunk=3, lanes=(3, 3))
    assert len(looked) >= 2  # stacked and the loop; with a compiler, what is on disk, too
    assert all(each.group == [6, 2, 4, 5] and each.longest > 1 for each in looked)


def test_auto_does_not_look_twice_at_who_is_hopeless(monkeypatch):
    module = sys.modules["coterie.engine.autotune"]  # its function has the same name
    monkeypatch.setattr(module, "compiling_takes", lambda *_: float("inf"))
    looks = []
    monkeypatch.setattr(module, "fan_out", lambda jobs, _: looks.append(1) or [jobs[0]()])
    monkeypatch.setattr(module, "ALIKE", float("inf"))  # engines that are about as fast would be timed once more
    for hopeless, number in ((float("inf"), 2), (0.0, 0)):
        looks.clear()
        monkeypatch.setattr(module, "HOPELESS", hopeless)
        assert set(pick(simulation(), workers=2).microseconds) == {"loop", "stacked"}
        assert len(looks) == number


def test_auto_shares_out_rounds_that_are_long_enough(monkeypatch):
    module = sys.modules["coterie.engine.autotune"]
    monkeypatch.setattr(module, "compiling_takes", lambda *_: float("inf"))
    monkeypatch.setattr(module, "cores", lambda: 2)
    monkeypatch.setattr(module, "PROCESS_SECONDS", 1.0)  # longer than a step on the busiest machine
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
    testing.same(before, sim.state, "measuring changes the state", tolerance=0)


@compiles
def test_auto_says_that_there_is_no_compiler(monkeypatch):
    def missing(*args, **kwargs):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr("coterie.compute.compiled.compile_graph", missing)
    choice = pick(simulation(dataclasses.replace(FedAvg(), optimizer=SGD(0.03125, momentum=0.03125))), compiled=True)
    assert "steps cannot be compiled here" in choice.notes[0]


def test_the_shape_of_a_stacked_engine():
    """As many chunks as processes, if there are clients enough; lanes that the cache holds and the sizes can fill."""
    room, sizes = 10**9, [10] * 20
    assert shape(sizes, 1000, 1000, 20, room, 2) == (10, (10, 10))
    assert shape(sizes, 1000, 1000, 20, room, 16) == (4, (4, 4))  # no fewer than four each
    assert shape(sizes, 10**8, 1000, 20, 5 * 10**8, 2) == (5, (5, 5))  # memory for five
    assert shape(sizes, 1000, 400_000, 20, room, 2) == (10, (5, 3))  # 3.5 MB of models, and 1 MB
    skewed = [100, *[10] * 19]
    assert max(shape(skewed, 1000, 1000, 20, room, 1)[1]) <= 6  # of 20: one has a third of all steps
