"""The laws: what must hold for every method, whatever it does. `check(MyMethod())` runs them all on a small federation.

 1  stacked = one at a time (to float tolerance), with BatchNorm, dropout and clients of different sizes
 2  server = peers on the complete graph, each with a copy of the server of its own (to float tolerance)
 3  inputs are not modified
 4  every hyper-parameter changes the result
 5  padding is ignored
 6  relabelling the clients relabels the results
 7  state and messages survive being packed, written and read again
 8  a client's update depends on its own data only
 9  with one client and one round, the result is what its local solver made
10  a run killed and resumed equals the run never killed, bit for bit
11  the number of worker processes changes nothing, bit for bit
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import torch
from pydantic import TypeAdapter
from safetensors.torch import load, save
from torch import nn

from coterie import rng, tree
from coterie.batches import Batches
from coterie.data.federation import Federation, Split
from coterie.data.minibatches import Plan, draw
from coterie.engine import Engine, Place, make_peers
from coterie.engine.workers import can_fork
from coterie.errors import CoterieWarning
from coterie.experiment.journal import at_once
from coterie.experiment.run import run_setup
from coterie.experiment.setup import prepare
from coterie.experiment.simulation import Simulation
from coterie.hyper import AnyMethod, Hyper, hyper_parameters
from coterie.method import Population
from coterie.task import Task
from coterie.tree import Params, Tree

SIZES = (5, 23, 12, 17)  # training examples; the third client lacks a class
PLAN = Plan(batch_size=4, epochs=2)
LOOP, STACKED = Engine("loop"), Engine("stacked", chunk=3)
# Under plain SGD. A strong penalty on a small network grows one rounding a thousandfold (to 1e-13 in float64).
ROUNDING = 1e-4


class LawBroken(AssertionError):
    pass


def check(method: AnyMethod) -> None:
    """All laws; raises `LawBroken` at the first that does not hold."""
    for law in LAWS.values():
        law(method)


def stacked_equals_one_at_a_time(method: AnyMethod) -> None:
    for context in contexts(method):
        # Adam divides tiny gradients by their own size, so rounding grows to a fraction of the learning rate.
        engines_agree(context, tolerance=2e-3)
        engines_agree(dataclasses.replace(context, **_plain_optimizer(method)), tolerance=ROUNDING)  # type: ignore[type-var]


def engines_agree(method: AnyMethod, tolerance: float) -> None:
    """The first law for the method as it is, without the company its options may need."""
    one, many = (_simulate(method, engine, rounds=3, participants=3) for engine in (LOOP, STACKED))
    _same(_result(one), _result(many), "loop and stacked differ", tolerance)


def server_equals_peers(method: AnyMethod) -> None:
    if not method.peer_to_peer:
        return
    complete = make_peers("complete", _federation().names, seed=0)
    plain = dataclasses.replace(method, **_plain_optimizer(method))  # type: ignore[type-var]
    for each, tolerance in ((method, 2e-3), (plain, ROUNDING)):
        one = _simulate(each, LOOP, rounds=3, participants=3)
        many = _simulate(each, LOOP, rounds=3, participants=3, place=complete)
        for i in range(len(SIZES)):
            copy = tree.rows(many.state.server, i)
            _same(one.state.server, copy, "a peer's copy of the server is not the server", tolerance)
        _same(_views(one), _views(many), "server and peers differ", tolerance)


def inputs_are_not_modified(method: AnyMethod) -> None:
    task, params = _task(), _task().init()
    ids = torch.arange(len(SIZES))

    def pure(name: str, fn: Callable[..., Any], *args: Any) -> Any:
        trees = [
            arg for arg in args if isinstance(arg, tuple | dict | torch.Tensor) and not isinstance(arg, Population)
        ]
        before = [tree.clone(arg) for arg in trees]
        out = fn(*args)
        for was, now in zip(before, trees, strict=True):
            _same(was, now, f"{name} modifies its input", tolerance=0)
        return out

    server = pure("init_server", method.init_server, params, Population(len(SIZES), len(SIZES), task))
    client = pure("init_client", method.init_client, params)
    down = pure("dispatch", method.dispatch, server, ids, torch.Generator())
    batches = _batches(0)
    updates = [pure("local_update", method.local_update, task, client, tree.rows(down, i), batches) for i in ids]
    ups = tree.stack([up for _, up, _ in updates])
    server = pure("aggregate", method.aggregate, server, ids, ups)
    down = pure("deploy", method.deploy, server, ids, torch.Generator())
    view = pure("personalize", method.personalize, task, updates[0][0], tree.rows(down, 0), batches)
    pure("predict", method.predict, task, view, _federation().x[:3])
    pure("server_info", method.server_info, server)


def hyper_parameters_change_the_result(method: AnyMethod) -> None:
    idle: set[str] | None = None
    for context in contexts(method):
        base = tree.pack(_views(_simulate(context, LOOP, rounds=2)))
        unchanged = set()
        for name, variant in variants(context):
            if idle is not None and name.split(" = ")[0] not in idle:
                continue  # it has shown its effect in an earlier context
            with warnings.catch_warnings():  # an extreme value may deserve one
                warnings.simplefilter("ignore", CoterieWarning)
                other = tree.pack(_views(_simulate(variant, LOOP, rounds=2)))
            if other.keys() == base.keys() and all(torch.equal(base[key], other[key]) for key in base):
                unchanged.add(name.split(" = ")[0])
        idle = unchanged if idle is None else idle & unchanged
    if idle:
        raise LawBroken(f"hyper-parameter {', '.join(sorted(idle))} changes nothing")


def padding_is_ignored(method: AnyMethod) -> None:
    task = _task(norm=False)
    params = task.init()
    server = method.init_server(params, Population(1, 1, task))
    client, down = method.init_client(params), tree.rows(method.dispatch(server, torch.arange(1), torch.Generator()), 0)
    batches = _batches(0)
    base = method.local_update(task, client, down, batches)
    # Masked examples of a short minibatch may be anything.
    other = torch.where(batches.mask > 0, batches.index, torch.tensor(int(_federation().split(1).train[0])))
    filled = method.local_update(task, client, down, batches._replace(index=other))
    _same(base, filled, "what stands in masked examples matters", tolerance=1e-6)
    # Whole masked steps may follow.
    index, mask, key = (torch.cat([part, 0 * part[:, :2]], 1) for part in (batches.index, batches.mask, batches.key))
    longer = method.local_update(task, client, down, batches._replace(index=index, mask=mask, key=key))
    _same(base, longer, "masked steps matter", tolerance=0)


def relabelling_relabels(method: AnyMethod) -> None:
    federation = _federation()
    order = [2, 0, 3, 1]
    names = [federation.names[i] for i in order]
    relabelled = dataclasses.replace(federation, clients={name: federation.clients[name] for name in names})
    base = _views(_simulate(method, LOOP, rounds=2, participants=3))
    other = _views(_simulate(method, LOOP, rounds=2, participants=3, federation=relabelled))
    _same(tree.rows(base, torch.tensor(order)), other, "the order of clients matters", tolerance=2e-3)


def packing_keeps_everything(method: AnyMethod) -> None:
    task = _task()
    sim = _simulate(method, LOOP, rounds=1)
    down = method.dispatch(sim.state.server, torch.arange(len(SIZES)), torch.Generator().manual_seed(0))
    client = tree.rows(sim.state.clients, 0)
    _, up, _ = method.local_update(task, client, tree.rows(down, 0), _batches(0))
    for name, value in {"server state": sim.state.server, "client state": client, "down": down, "up": up}.items():
        flat = load(save(tree.separate(tree.pack(value))))
        _same(value, tree.unpack(flat, value), f"{name} does not survive packing", tolerance=0)


def updates_use_own_data_only(method: AnyMethod) -> None:
    federation, task = _federation(), _task()
    params = task.init()
    server = method.init_server(params, Population(len(SIZES), len(SIZES), task))
    client, down = method.init_client(params), tree.rows(method.dispatch(server, torch.arange(1), torch.Generator()), 0)
    own = torch.zeros(len(federation.x), dtype=torch.bool)
    own[torch.from_numpy(federation.split(0).train)] = True
    batches = _batches(0)
    foreign = batches._replace(x=torch.where(own[:, None], batches.x, torch.nan), y=torch.where(own, batches.y, 0))
    base, other = (method.local_update(task, client, down, each) for each in (batches, foreign))
    _same(base, other, "other clients' data matters", tolerance=0)


def one_client_gets_its_own_solution(method: AnyMethod) -> None:
    task, federation = _task(), _federation()
    params, ids = task.init(), torch.arange(1)
    server = method.init_server(params, Population(1, 1, task))
    down = tree.rows(method.dispatch(server, ids, torch.Generator().manual_seed(0)), 0)
    client, up, _ = method.local_update(task, method.init_client(params), down, _batches(0))
    server = method.aggregate(server, ids, tree.stack([up]))
    down = tree.rows(method.deploy(server, ids, torch.Generator().manual_seed(0)), 0)
    x = federation.x[:20]
    # Logits are known up to a constant: a method may give the logarithms of probabilities.
    view = method.personalize(task, client, down, _batches(0).epoch(0, 0))
    deployed = method.predict(task, view, x).softmax(1)
    made = [model for model in _models((client, up), params) if not _equal(model, params)]
    # A method that sends gradients makes the model where they are combined.
    found = made or [*_models(server, params, rows=True)]
    # One that predicts from a model's features, not by its head, holds the model itself in its view.
    held = [*_models(view, params)]

    def deploys(model: Params) -> bool:
        same = torch.allclose(deployed, task.logits(model, x).softmax(1), atol=1e-5)
        return same or any(float(tree.sqdist(own, model)) < 1e-10 for own in held)

    if not any(map(deploys, found)):
        raise LawBroken("alone, a client does not deploy the model that its local solver made")
    if deploys(params):
        raise LawBroken("alone, a client deploys the initial model: nothing was trained")


def resuming_changes_nothing(method: AnyMethod) -> None:
    setup = prepare(
        method, _federation(), model=_module(), rounds=4, batch_size=4, clients_per_round=3, reference=False,
        engine="loop", compile=False, workers=1, checkpoint_every=2,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, at_once():
        whole = run_setup(setup, Path(folder) / "whole")
        # Killed after round 3 was logged and before its checkpoint: round 3 is done again, from round 2's.
        try:
            run_setup(setup, Path(folder) / "killed", progress=_KilledAt(3))
        except _Killed:
            resumed = run_setup(setup, Path(folder) / "killed", resuming=True)
        else:
            raise LawBroken("the run was not killed")
        _same(whole.views, resumed.views, "a resumed run ends with other models", tolerance=0)
        if _without_times(whole.rounds) != _without_times(resumed.rounds):
            raise LawBroken("a resumed run has another history")


def workers_change_nothing(method: AnyMethod) -> None:
    if not can_fork():
        return
    engines = [Engine("stacked", chunk=1, workers=workers) for workers in (1, 2, 3)]
    base, *others = (_result(_simulate(method, engine, rounds=2, participants=3)) for engine in engines)
    for workers, other in zip((2, 3), others, strict=True):
        _same(base, other, f"{workers} workers give other results than one", tolerance=0)


LAWS: dict[str, Callable[[AnyMethod], None]] = {
    "1 stacked = one at a time": stacked_equals_one_at_a_time,
    "2 server = peers": server_equals_peers,
    "3 inputs are not modified": inputs_are_not_modified,
    "4 hyper-parameters change the result": hyper_parameters_change_the_result,
    "5 padding is ignored": padding_is_ignored,
    "6 relabelling relabels": relabelling_relabels,
    "7 packing keeps everything": packing_keeps_everything,
    "8 own data only": updates_use_own_data_only,
    "9 one client, own solution": one_client_gets_its_own_solution,
    "10 resuming changes nothing": resuming_changes_nothing,
    "11 workers change nothing": workers_change_nothing,
}


def contexts(method: AnyMethod) -> list[AnyMethod]:
    """The method as it is, and with each set of options in `law_contexts`: where its other options come into play.

    A hyper-parameter that matters only together with another one (a step size of an option that is off by default)
    changes nothing on its own; the method then names the company it needs, and law 4 asks for a change in any context.
    """
    found: tuple[dict[str, Any], ...] = getattr(type(method), "law_contexts", ())
    return [method, *(dataclasses.replace(method, **options) for options in found)]  # type: ignore[type-var]


def variants(method: AnyMethod) -> Iterator[tuple[str, AnyMethod]]:
    """The method with one hyper-parameter changed, for every one of them and every choice it offers."""
    for hyper in hyper_parameters(type(method)):
        for value in _others(hyper, getattr(method, hyper.name)):
            yield f"{hyper.name} = {value}", dataclasses.replace(method, **{hyper.name: value})  # type: ignore[type-var]
    optimizer: Any = getattr(method, "optimizer", None)
    if optimizer is not None:
        for hyper in hyper_parameters(type(optimizer)):
            for value in _others(hyper, getattr(optimizer, hyper.name)):
                changed = dataclasses.replace(optimizer, **{hyper.name: value})
                yield f"{hyper.name} = {value}", dataclasses.replace(method, optimizer=changed)  # type: ignore[type-var]


def _others(hyper: Hyper, value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    others: list[Any] = [choice for choice in hyper.choices if choice != value]
    if hyper.numeric:
        number = value if isinstance(value, int | float) else 1.0
        tries = [number + 1] if isinstance(value, int) else [2 * number + 0.1, number / 2, number]
        for other in tries:
            try:
                others.append(TypeAdapter(hyper.type).validate_python(other))
                break
            except pydantic.ValidationError:
                continue
    if not others:
        raise LawBroken(f"no other value found for {hyper.name} = {value}")
    return others


@cache
def _federation() -> Federation:
    x = torch.randn(200, 6, generator=rng.torch_generator("laws", "x"))
    y = (x @ torch.randn(6, 3, generator=rng.torch_generator("laws", "w"))).argmax(1)
    clients, free = {}, np.arange(len(x))
    for i, size in enumerate(SIZES):
        allowed = free[(y.numpy()[free] != 0) | (i != 2)]
        train, validation, test = np.split(allowed[: size + 10], [size, size + 4])
        clients[f"site-{i}"] = Split(train, validation, test)
        free = np.setdiff1d(free, allowed[: size + 10])
    return Federation("laws", x, y, clients, 3)


def _module(norm: bool = True) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        middle = [nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)] if norm else [nn.Tanh()]
        return nn.Sequential(nn.Linear(6, 8), *middle, nn.Linear(8, 3))


@cache
def _task(norm: bool = True) -> Task:
    return Task(_module(norm), num_classes=3)


def _batches(client: int) -> Batches:
    batches = draw(_federation(), [client], PLAN, seed=0, purpose="laws", round=1)
    return batches._replace(index=batches.index[0], mask=batches.mask[0], key=batches.key[0], count=batches.count[0])


def _simulate(
    method: AnyMethod,
    engine: Engine,
    rounds: int,
    participants: int = len(SIZES),
    federation: Federation | None = None,
    place: Place | None = None,
) -> Simulation:
    sim = Simulation.start(method, _task(), federation or _federation(), PLAN, participants, seed=0, place=place)
    for number in range(1, rounds + 1):
        sim.train(number, engine)
    return sim


def _views(sim: Simulation) -> Tree:
    return sim.views(1, LOOP)


def _result(sim: Simulation) -> Tree:
    return sim.state, _views(sim)


def _plain_optimizer(method: AnyMethod) -> dict[str, Any]:
    from coterie.local import SGD

    return {"optimizer": SGD(0.05)} if hasattr(method, "optimizer") else {}


def _models(value: Tree, like: Params, rows: bool = False) -> Iterator[Params]:
    """Every model (a dict with a model's names and shapes) inside a tree; if asked, also those in rows."""
    if isinstance(value, dict) and value.keys() == like.keys():
        if all(value[name].shape == like[name].shape for name in like):
            yield value
        elif rows:
            yield from _models(tuple(tree.rows(value, i) for i in range(len(next(iter(value.values()))))), like)
    elif isinstance(value, dict | tuple):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _models(child, like, rows)


def _equal(a: Params, b: Params) -> bool:
    return all(torch.equal(a[name], b[name]) for name in b)


def _same(a: Tree, b: Tree, complaint: str, tolerance: float) -> None:
    left, right = tree.pack(a), tree.pack(b)
    if left.keys() != right.keys():
        raise LawBroken(f"{complaint}: other names {sorted(left.keys() ^ right.keys())}")
    for path, leaf in left.items():
        other = right[path]
        if leaf.shape != other.shape or leaf.dtype != other.dtype:
            raise LawBroken(f"{complaint}: '{path}' has another shape or type")
        equal = (
            torch.equal(leaf, other) if not tolerance else torch.allclose(leaf, other, rtol=tolerance, atol=tolerance)
        )
        if not equal:
            worst = float((leaf.double() - other.double()).abs().max())
            raise LawBroken(f"{complaint}: '{path}' by up to {worst:.2g}")


def _without_times(rounds: list[dict[str, Any]]) -> str:
    return json.dumps([{key: value for key, value in row.items() if key != "seconds"} for row in rounds])


class _Killed(BaseException):
    """Not an Exception, so that nothing on the way can treat it as one: a kill."""


class _KilledAt:
    def __init__(self, number: int) -> None:
        self.number = number

    def say(self, text: str) -> None: ...
    def start(self, label: str, done: int, rounds: int) -> None: ...
    def stop(self) -> None: ...

    def round(self, record: dict[str, Any], metric: str) -> None:
        if record["round"] == self.number:
            raise _Killed
