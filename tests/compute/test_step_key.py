"""Steps have the same key in every process, and other steps have others."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coterie.compute import step_key as module
from coterie.compute.step_key import step_key
from coterie.core import tree
from coterie.core.backend import using
from coterie.core.batches import Batch
from coterie.core.optimizers import SGD, Adam
from coterie.core.scan import Program, identity
from coterie.core.task import Task
from coterie.core.training import quadratic_penalty, train
from coterie.data.federation import from_clients
from coterie.data.minibatches import Plan
from coterie.engine.stacked import stacked
from coterie.experiment.simulation import Simulation
from coterie.methods import METHODS
from tests.places import ROOT

KINDS = (((3,), torch.float32, torch.device("cpu")),)


def key(step: Any, kinds: Any = KINDS) -> str | None:
    return step_key(Program(step, torch.zeros(3), ()), kinds)


class Watch:
    """A back-end that does nothing but remember what it was asked for."""

    def __init__(self) -> None:
        self.programs: list[Program] = []

    def scan(self, program: Program, carry: list[Tensor], fixed: Any, time: Any) -> list[Tensor]:
        self.programs.append(program)
        return carry


def program_of(method: Any, task: Task | None = None) -> Program:
    """The first scan of a method."""
    torch.manual_seed(0)
    task = task or Task(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)), num_classes=2)
    data = {f"{i}": (torch.ones(12, 4), torch.arange(12) % 2) for i in range(2)}
    sim = Simulation.start(method, task, from_clients(data), Plan(batch_size=4), 2, seed=0)
    fn, ids, rows_of = sim.probe()
    watch = Watch()
    with using(watch):
        stacked(fn, *rows_of(list(ids)))
    return watch.programs[0]


@functools.cache
def programs() -> dict[str, Program]:
    """The first scan of every method."""
    return {name: program_of(method()) for name, method in METHODS.items()}


def keys_of_methods() -> dict[str, str | None]:
    return {name: step_key(program, KINDS) for name, program in programs().items()}


def test_methods_have_the_same_key_exactly_where_their_steps_are_the_same() -> None:
    def place(program: Program) -> Any:
        return identity(program.step), tuple(tree.pack(program.carry)), tuple(tree.pack(program.aux)), program.lifts

    keys, places = keys_of_methods(), {name: place(program) for name, program in programs().items()}
    assert None not in keys.values()
    assert len(set(keys.values())) > 5
    for one in keys:
        for other in keys:
            assert (keys[one] == keys[other]) == (places[one] == places[other]), (one, other)


def test_keys_are_the_same_in_another_process() -> None:
    code = "from tests.compute.test_step_key import keys_of_methods; print(keys_of_methods())"
    where = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "PYTHONHASHSEED": "7"}
    limit = f"import torch; torch.set_num_threads({torch.get_num_threads()}); "
    done = subprocess.run(
        [sys.executable, "-c", limit + code], env={**os.environ, **where}, text=True, capture_output=True, check=True
    )
    assert done.stdout.strip() == str(keys_of_methods())


def network(width: int = 5, activation: Any = nn.ReLU, **options: Any) -> Task:
    torch.manual_seed(0)
    return Task(nn.Sequential(nn.Linear(4, width), activation(), nn.Linear(width, 2)), num_classes=2, **options)


def test_hyper_parameters_and_models_are_parts_of_the_key() -> None:
    fedmap, fedprox = METHODS["fedmap"], METHODS["fedprox"]
    base = program_of(fedprox(optimizer=SGD(0.1)))
    assert step_key(program_of(fedprox(optimizer=SGD(0.1))), KINDS) == step_key(base, KINDS)
    assert step_key(program_of(fedprox(optimizer=SGD(0.2))), KINDS) == step_key(base, KINDS)  # the step size is a value
    other = [
        program_of(fedprox(optimizer=SGD(0.1, momentum=0.5))),
        program_of(fedprox(optimizer=Adam(0.1))),
        program_of(fedmap(optimizer=SGD(0.1))),
        program_of(fedprox(optimizer=SGD(0.1)), network(activation=nn.Tanh)),
        program_of(fedprox(optimizer=SGD(0.1)), network(bf16=True)),
        program_of(fedprox(optimizer=SGD(0.1)), network(loss=lambda out, y: out.sum(1))),
        program_of(fedprox(optimizer=SGD(0.1)), network(loss=lambda out, y: 2 * out.sum(1))),
    ]
    keys = [step_key(each, KINDS) for each in (base, *other)]
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_the_values_of_a_model_are_no_part_of_the_key() -> None:
    one, other = network(), network()
    with torch.no_grad():
        other._train[0].weight.add_(1)  # type: ignore[index, union-attr, operator]
    assert key(functools.partial(train, one)) == key(functools.partial(train, other))
    assert key(functools.partial(train, one)) != key(functools.partial(train, network(6)))


def test_shapes_types_and_settings_are_parts_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(carry: Any, aux: Any, batch: Batch) -> Any:
        return carry

    module.machine.cache_clear()  # an earlier test may have asked on a machine of its own making
    cpu = torch.device("cpu")
    found = [key(step), key(step, [((4,), torch.float32, cpu)]), key(step, [((3,), torch.float64, cpu)])]
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    found.append(key(step))
    torch.set_num_threads(before)
    for name in ("_own_source", "_processor"):
        module.machine.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda: "another")
            found.append(key(step))
    module.machine.cache_clear()
    with monkeypatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_GRAPH_PARTITION", "0")
        found.append(key(step))
    module.machine.cache_clear()
    assert None not in found
    assert len(set(found)) == len(found)
    assert key(step) == found[0]


SOURCE = """
FACTOR = {factor}
def helper(value):
    return {helper} * value
class Model:
    def scaled(self, value):
        return value / {inner}
class Kept:
    scale = staticmethod(lambda value: value)
def step(carry, aux, batch):
    inner = lambda value: FACTOR * helper(value)
    return {outer} * inner(Model().scaled(carry))
"""


def defined(**numbers: float) -> Any:
    names: dict[str, Any] = {"__name__": "somebody.elses"}
    exec(SOURCE.format(**{"factor": 2, "helper": 3, "inner": 4, "outer": 5, **numbers}), names)
    return names["step"]


def test_bytecode_constants_and_globals_are_parts_of_the_key() -> None:
    keys = [
        key(defined(**changed)) for changed in ({}, *({name: 7} for name in ("factor", "helper", "inner", "outer")))
    ]
    assert None not in keys
    assert len(set(keys)) == 5
    assert key(defined()) == keys[0]
    assert key(defined(outer=5.0)) != keys[0]  # a float is no integer


def test_what_is_known_by_its_address_has_no_key() -> None:
    for closed in (object(), Watch(), Watch().scan):
        assert key(functools.partial(train, closed)) is None

    def step(carry: Any, aux: Any, batch: Batch) -> Any:
        return pytest.approx(carry)  # a module of somebody else's

    assert key(step) is None
    assert key(functools.partial(quadratic_penalty)) is not None
