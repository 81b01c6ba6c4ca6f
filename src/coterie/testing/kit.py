"""What laws and tests are made of: a small federation, a model for it, a run of a few rounds, and a comparison.

Everything here is deterministic and made once, so that tests which use it share data, models and compiled steps.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from coterie.core import rng, tree
from coterie.core.batches import Batches
from coterie.core.task import Task
from coterie.core.tree import Tree
from coterie.data.federation import Federation, Split
from coterie.data.minibatches import Plan, draw
from coterie.engine import Engine, Place
from coterie.experiment.simulation import Simulation
from coterie.methods.fields import AnyMethod

SIZES = (5, 23, 12, 17)  # training examples of the four clients; the third one has no example of class 0
PLAN = Plan(batch_size=4, epochs=2)
LOOP, STACKED = Engine("loop"), Engine("stacked", chunk=3)


class LawBroken(AssertionError):
    """A law does not hold; the message says what was found."""


class DoesNotApply(Exception):
    """A law cannot be asked of this method, or not on this machine; the message says why."""


@cache
def federation() -> Federation:
    """Four clients with 6 features, 3 classes and `SIZES` training examples; each has 4 for validation, 6 to test."""
    x = torch.randn(200, 6, generator=rng.torch_generator("laws", "x"))
    y = (x @ torch.randn(6, 3, generator=rng.torch_generator("laws", "w"))).argmax(1)
    clients, free = {}, np.arange(len(x))
    for i, size in enumerate(SIZES):
        allowed = free[(y.numpy()[free] != 0) | (i != 2)]
        train, validation, test = np.split(allowed[: size + 10], [size, size + 4])
        clients[f"site-{i}"] = Split(train, validation, test)
        free = np.setdiff1d(free, allowed[: size + 10])
    return Federation("laws", x, y, clients, 3)


def module(norm: bool = True) -> nn.Module:
    """Make a perceptron of 6, 8 and 3 units: with BatchNorm and dropout, or (`norm` False) with neither.

    The layer before the BatchNorm has no bias. The BatchNorm would subtract it again, so its gradient would be
    nothing but rounding, which Adam divides by its own size: every engine would move it by whole steps of its own.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        middle = [nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)] if norm else [nn.Tanh()]
        return nn.Sequential(nn.Linear(6, 8, bias=not norm), *middle, nn.Linear(8, 3))


@cache
def task(norm: bool = True) -> Task:
    """Make the task of `module(norm)`."""
    return Task(module(norm), num_classes=3)


def batches(client: int, method: AnyMethod | None = None) -> Batches:
    """Draw the minibatches of one client in one round, as a run of `method` draws them."""
    plan = PLAN if method is None else replace(PLAN, withheld=method.withheld_share)
    drawn = draw(federation(), [client], plan, seed=0, purpose="laws", round=1)
    return Batches(drawn.x, drawn.y, *tree.rows(drawn[2:], 0))


def simulate(
    method: AnyMethod,
    engine: Engine = LOOP,
    rounds: int = 2,
    participants: int = len(SIZES),
    clients: Federation | None = None,
    place: Place | None = None,
    norm: bool = True,
) -> Simulation:
    """Train `method` for some rounds.

    Args:
        method: the method, which is scheduled for these rounds.
        engine: what runs the clients; by default one at a time, which the others must agree with.
        rounds: how many.
        participants: clients a round; where they are not all of them, other clients take part in every round.
        clients: their data; by default `federation()`.
        place: where messages are combined; by default on one server.
        norm: whether the network has BatchNorm and dropout.

    Returns:
        The simulation after its last round; its `state` holds the server's state and the clients'.
    """
    method = method.scheduled(rounds)
    sim = Simulation.start(method, task(norm), clients or federation(), PLAN, participants, seed=0, place=place)
    for number in range(1, rounds + 1):
        sim.train(number, engine)
    return sim


def views(sim: Simulation, engine: Engine = LOOP) -> Tree:
    """Return what every client would deploy now, as rows."""
    return sim.views(1, engine)


def result(sim: Simulation) -> tuple[Tree, Tree]:
    """Return all that a run leaves: its state, and what its clients would deploy."""
    return sim.state, views(sim)


def same(a: Tree, b: Tree, complaint: str, tolerance: float) -> None:
    """Complain unless two trees have the same names, shapes, types and, within `tolerance`, numbers.

    Args:
        a: a tree of tensors.
        b: another one.
        complaint: how the error begins.
        tolerance: relative and absolute; 0 asks for the same bits.

    Raises:
        LawBroken: with the complaint, the first leaf that differs, and by how much.
    """
    left, right = tree.pack(a), tree.pack(b)
    if left.keys() != right.keys():
        raise LawBroken(f"{complaint}: other names {sorted(left.keys() ^ right.keys())}")
    for path, leaf in left.items():
        other = right[path]
        if leaf.shape != other.shape or leaf.dtype != other.dtype:
            raise LawBroken(f"{complaint}: '{path}' has another shape or type")
        equal = torch.allclose(leaf, other, rtol=tolerance, atol=tolerance) if tolerance else torch.equal(leaf, other)
        if not equal:
            worst = float((leaf.double() - other.double()).abs().max())
            raise LawBroken(f"{complaint}: '{path}' by up to {worst:.2g}")


def without_times(rounds: list[dict[str, Any]]) -> str:
    """Return the records of a run's rounds, without what depends on the clock."""
    return json.dumps([{key: value for key, value in row.items() if key != "seconds"} for row in rounds])


class Killed(BaseException):
    """A kill. It is no `Exception`, so that nothing on the way can handle it as one."""


class KillAfter:
    """A run's progress that kills the run after a round: the round is logged, and nothing later happens."""

    def __init__(self, number: int) -> None:
        self.number = number

    def say(self, text: str) -> None: ...
    def start(self, label: str, done: int, rounds: int) -> None: ...
    def stop(self) -> None: ...

    def round(self, record: dict[str, Any], metric: str) -> None:
        if record["round"] == self.number:
            raise Killed
