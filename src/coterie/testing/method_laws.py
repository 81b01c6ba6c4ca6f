"""The laws about a method's own functions: laws 2 to 9."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors.torch import load, save

from coterie.core import tree
from coterie.core.errors import CoterieWarning
from coterie.core.method import Population
from coterie.core.task import Task
from coterie.core.tree import Params, Tree
from coterie.engine import Engine, make_peers
from coterie.methods.fields import AnyMethod
from coterie.testing.engine_laws import ADAM_ROUNDING, ROUNDING
from coterie.testing.kit import (
    LOOP,
    SIZES,
    STACKED,
    DoesNotApply,
    LawBroken,
    batches,
    federation,
    module,
    same,
    simulate,
    task,
    views,
)
from coterie.testing.learning import every_setting_learns
from coterie.testing.options import contexts, plain, variants


def server_equals_peers(method: AnyMethod) -> None:
    """Law 2; stacked, which takes half the time, and which law 1 allows."""
    if not method.peer_to_peer:
        raise DoesNotApply("the method needs one server (peer_to_peer = False)")
    complete = make_peers("complete", federation().names, seed=0)
    for each, tolerance in ((method, ADAM_ROUNDING), (plain(method), ROUNDING)):
        one = simulate(each, STACKED, rounds=3, participants=3)
        many = simulate(each, STACKED, rounds=3, participants=3, place=complete)
        for i in range(len(SIZES)):
            copy = tree.rows(many.state.server, i)
            mine = tree.map(functools.partial(_held, i), one.state.server, copy)
            same(mine, copy, "a peer's copy of the server is not the server", tolerance)
        same(views(one, STACKED), views(many, STACKED), "server and peers differ", tolerance)


def _held(peer: int, server: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """Return what a peer's copy should have of a leaf of the server: all, or its own row only (`Population.holds`)."""
    return server if server.shape == copy.shape else server[peer : peer + 1]


def inputs_are_not_modified(method: AnyMethod) -> None:
    """Law 3."""
    params, ids = task().init(), torch.arange(len(SIZES))

    def pure(name: str, fn: Callable[..., Any], *args: Any) -> Any:
        trees = [
            arg for arg in args if isinstance(arg, tuple | dict | torch.Tensor) and not isinstance(arg, Population)
        ]
        before = [tree.clone(arg) for arg in trees]
        out = fn(*args)
        for was, now in zip(before, trees, strict=True):
            same(was, now, f"{name} modifies its input", tolerance=0)
        return out

    server = pure("init_server", method.init_server, params, Population(len(SIZES), len(SIZES), task()))
    client = pure("init_client", method.init_client, params)
    down = pure("dispatch", method.dispatch, server, ids, torch.Generator())
    own = batches(0, method)
    updates = [pure("local_update", method.local_update, task(), client, tree.rows(down, i), own) for i in ids]
    ups = tree.stack([up for _, up, _ in updates])
    server = pure("aggregate", method.aggregate, server, ids, ups)
    down = pure("deploy", method.deploy, server, ids, torch.Generator())
    view = pure("personalize", method.personalize, task(), updates[0][0], tree.rows(down, 0), own)
    pure("predict", method.predict, task(), view, federation().x[:3])
    pure("server_info", method.server_info, server)


def options_act_and_the_method_learns(method: AnyMethod, everything: bool = True) -> str | None:
    """Law 4: every option changes the result, and beside every option the method learns (`coterie.testing.learning`).

    `everything` False leaves numbers as they are in the second half, which then takes a second a method.
    """
    options_change_the_result(method)
    return every_setting_learns(method, everything)


def options_change_the_result(method: AnyMethod) -> None:
    """Check the first half of law 4: each of them does, in at least one context."""
    idle: set[str] | None = None
    for context in contexts(method):
        base = _deployed(context)
        unchanged = set()
        for name, variant in variants(context):
            if idle is not None and name.split(" = ")[0] not in idle:
                continue  # it has shown its effect in an earlier context
            with warnings.catch_warnings():  # an extreme value may deserve one
                warnings.simplefilter("ignore", CoterieWarning)
                other = _deployed(variant)
            if other.keys() == base.keys() and all(torch.equal(base[key], other[key]) for key in base):
                unchanged.add(name.split(" = ")[0])
        idle = unchanged if idle is None else idle & unchanged
    if idle:
        raise LawBroken(f"hyper-parameter {', '.join(sorted(idle))} changes nothing")


def _deployed(method: AnyMethod) -> dict[str, torch.Tensor]:
    """Return what clients deploy after two rounds; stacked, which takes half the time, and which law 1 allows."""
    engine = Engine("stacked", chunk=len(SIZES))
    return tree.pack(views(simulate(method, engine, rounds=2), engine))


def padding_is_ignored(method: AnyMethod) -> None:
    """Law 5: what stands in masked examples, and how many masked steps follow."""
    smooth = task(norm=False)  # BatchNorm does see what is masked: its statistics are of whole minibatches
    params = smooth.init()
    server = method.init_server(params, Population(1, 1, smooth))
    client, down = method.init_client(params), tree.rows(method.dispatch(server, torch.arange(1), torch.Generator()), 0)
    own = batches(0, method)
    base = method.local_update(smooth, client, down, own)
    other = torch.where(own.mask > 0, own.index, torch.tensor(int(federation().split(1).train[0])))
    filled = method.local_update(smooth, client, down, own._replace(index=other))
    same(base, filled, "what stands in masked examples matters", tolerance=1e-6)
    index, mask, key = (torch.cat([part, 0 * part[:, :2]], 1) for part in (own.index, own.mask, own.key))
    longer = method.local_update(smooth, client, down, own._replace(index=index, mask=mask, key=key))
    same(base, longer, "masked steps matter", tolerance=0)


def relabelling_relabels(method: AnyMethod) -> None:
    """Law 6."""
    order = [2, 0, 3, 1]
    names = [federation().names[i] for i in order]
    relabelled = dataclasses.replace(federation(), clients={name: federation().clients[name] for name in names})
    base = views(simulate(method, LOOP, rounds=2, participants=3))
    other = views(simulate(method, LOOP, rounds=2, participants=3, clients=relabelled))
    same(tree.rows(base, torch.tensor(order)), other, "the order of clients matters", ADAM_ROUNDING)


def packing_keeps_everything(method: AnyMethod) -> None:
    """Law 7."""
    sim = simulate(method, LOOP, rounds=1)
    down = method.dispatch(sim.state.server, torch.arange(len(SIZES)), torch.Generator().manual_seed(0))
    client = tree.rows(sim.state.clients, 0)
    _, up, _ = method.local_update(task(), client, tree.rows(down, 0), batches(0, method))
    for name, value in {"server state": sim.state.server, "client state": client, "down": down, "up": up}.items():
        try:
            read = tree.unpack(load(save(tree.separate(tree.pack(value)))), value)
        except Exception as error:
            raise LawBroken(f"{name} cannot be packed, written and read again: {error}") from error
        same(value, read, f"{name} does not survive packing", tolerance=0)
    _frozen_values_stay(method)


def _frozen_values_stay(method: AnyMethod) -> None:
    """The second half of law 7: what is dispatched under a frozen parameter's name is not sent, since it is known."""
    net = module()
    net.get_submodule("0").requires_grad_(False)
    model, ids = Task(net, num_classes=3), torch.arange(len(SIZES))
    server = method.init_server(model.init(), Population(len(SIZES), len(SIZES), model))
    client = method.init_client(model.init())

    def told() -> dict[str, Tree]:
        draw = torch.Generator().manual_seed(0)
        found = {"dispatch": method.dispatch(server, ids, draw), "deploy": method.deploy(server, ids, draw)}
        shared = method.global_model(server)
        return {**found, "offer": method.offer(server, ids), **({} if shared is None else {"global_model": shared})}

    def frozen(messages: dict[str, Tree]) -> Params:
        return {path: leaf for path, leaf in tree.pack(messages).items() if path.rpartition("/")[2] == "0.weight"}

    first = frozen(told())
    for _ in range(2):
        down = tree.rows(method.dispatch(server, ids, torch.Generator().manual_seed(0)), 0)
        client, up, _ = method.local_update(model, client, down, batches(1, method))
        server = method.aggregate(server, ids, tree.stack([up] * len(SIZES)))
    same(first, frozen(told()), "what is sent under the name of a frozen parameter changes", ROUNDING)


def updates_use_own_data_only(method: AnyMethod) -> None:
    """Law 8: the other clients' examples may be anything, even NaN."""
    params = task().init()
    server = method.init_server(params, Population(len(SIZES), len(SIZES), task()))
    client, down = method.init_client(params), tree.rows(method.dispatch(server, torch.arange(1), torch.Generator()), 0)
    known = torch.zeros(len(federation().x), dtype=torch.bool)
    known[torch.from_numpy(federation().split(0).train)] = True
    own = batches(0, method)
    foreign = own._replace(x=torch.where(known[:, None], own.x, torch.nan), y=torch.where(known, own.y, 0))
    base, other = (method.local_update(task(), client, down, each) for each in (own, foreign))
    same(base, other, "other clients' data matters", tolerance=0)


def one_client_gets_its_own_solution(method: AnyMethod) -> None:
    """Law 9."""
    params, ids = task().init(), torch.arange(1)
    server = method.init_server(params, Population(1, 1, task()))
    down = tree.rows(method.dispatch(server, ids, torch.Generator().manual_seed(0)), 0)
    client, up, _ = method.local_update(task(), method.init_client(params), down, batches(0, method))
    server = method.aggregate(server, ids, tree.stack([up]))
    down = tree.rows(method.deploy(server, ids, torch.Generator().manual_seed(0)), 0)
    x = federation().x[:20]
    # Logits are known up to a constant: a method may give the logarithms of probabilities.
    view = method.personalize(task(), client, down, batches(0, method).epoch(0, 0))
    deployed = method.predict(task(), view, x).softmax(1)
    made = [model for model in _models((client, up), params) if not _equal(model, params)]
    # A method that sends gradients makes the model where they are combined.
    found = made or [*_models(server, params, rows=True)]
    # One that predicts from a model's features, not by its head, holds the model itself in its view.
    held = [*_models(view, params)]

    def deploys(model: Params) -> bool:
        alike = torch.allclose(deployed, task().logits(model, x).softmax(1), atol=1e-5)
        return alike or any(float(tree.sqdist(own, model)) < 1e-10 for own in held)

    if not any(map(deploys, found)):
        raise LawBroken("alone, a client does not deploy the model that its local solver made")
    if deploys(params):
        raise LawBroken("alone, a client deploys the initial model: nothing was trained")


def _models(value: Tree, like: Params, rows: bool = False) -> Iterator[Params]:
    """Yield every model (a dict with a model's names and shapes) inside a tree; if asked, also those in rows.

    A message without what is never sent (`Task.sent`) is a model too, with the rest from `like`.
    """
    if not rows and isinstance(value, dict) and value.keys() == task().sent(like).keys():
        value = {**like, **value}
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
