"""Probe a method before a run: two real rounds of a few clients and steps, with a look at what moves their models.

Whatever the method adds to the loss reaches its optimiser as a gradient. With g_t what the optimiser is given in step
t, d_t the gradient of the loss alone at the same parameters on the same minibatch, and p_t = g_t - d_t:

    strength = ||sum_t p_t|| / ||sum_t d_t||                   (`Path.strength`), over the steps of one optimiser
    movement = ||theta_T - theta_0|| / ||theta'_T - theta_0||  (`pull_of`), where theta' takes the steps by d_t alone
    progress = ||v' - v|| / ||v'' - v||                        (`progress_of`), v before and v' after the round what
                                                               a client deploys, v'' from v by training alone

A strength of 0 means that the terms do nothing, a strength near 1 that they balance the data, and a movement near 0
that they hold the model where it was. No method has to help: its optimiser and its task are replaced by ones that watch
(`Watch`). Nothing here is compiled, and nothing is kept, so a run after a probe has the bits of a run without one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from coterie.core import tree
from coterie.core.batches import Batch, Batches
from coterie.core.device import on
from coterie.core.optimizers import Optimizer
from coterie.core.task import Task
from coterie.core.training import train
from coterie.core.tree import Params, Tree
from coterie.data import Federation
from coterie.engine import Engine, in_order
from coterie.experiment.setup import Setup
from coterie.experiment.simulation import Simulation
from coterie.methods.fields import with_optimizer

MAX_CLIENTS = 32  # in a probe
KEPT_BYTES = 2**28  # of models that a probe may hold
ROUNDING = 1e-6  # of the data's gradient; a smaller difference is no term of the method
Seen = tuple[Params, Batch]  # what a task was last asked for the loss of


@dataclasses.dataclass
class Probe(Simulation):
    """A simulation whose clients stop after `most` minibatches of a round."""

    most: int = 200

    def _local_update(self, client: Tree, down: Tree, batches: Batches) -> Any:
        return super()._local_update(client, down, batches.first_steps(self.most))

    def steps(self, client: int) -> int:
        """Return how many steps a client takes in a round of the probe."""
        return min(self.most, self.plan.num_steps(self.federation.sizes[client]))

    def traffic(self) -> tuple[int, int]:
        """Return the bytes (up, down) of a first round. With `most` = 0 nobody trains: messages have their shapes."""
        ids = self.sample(1)
        down, rows_of = self._work(1, ids)
        with on(self.federation.x.device):
            _, ups, _ = in_order(Engine("loop").map(self._local_update, self.federation, ids, rows_of, "probe"), ids)
            return self.place.traffic(self.method, self._at(ids), ups, self.task.sent(down))

    def alone(self, views: Params, round: int, client: int) -> Params:
        """Return what a client's minibatches of a round make of its view (one of the rows `views`) without a method."""
        optimizer: Any = getattr(self.method, "optimizer", None)
        optimizer = optimizer.unguarded

        def local(view: Params, batches: Batches) -> Params:
            return train(self.task, optimizer, view, batches.first_steps(self.most))[0]

        def rows_of(group: list[int]) -> Any:
            return (tree.rows(views, self._at(group)),), self._draw(group, self.plan, "minibatches", round)

        ((_, trained),) = Engine("loop").map(local, self.federation, [client], rows_of, "probe")
        return tree.rows(trained, 0)


def slow(setup: Setup) -> bool:
    """Return whether a step takes more than some milliseconds."""
    return setup.task.convolves or tree.nbytes(setup.task.init()) > 2**20


def make_probe(setup: Setup, clients: int, steps: int) -> Probe:
    """Make a simulation of so many of the clients, all of whom take part in every round."""
    names = setup.federation.names
    chosen = [names[i] for i in spread(setup.federation, clients)]
    federation = setup.federation
    if len(chosen) < len(names):
        federation = dataclasses.replace(federation, clients={name: federation.clients[name] for name in chosen})
    place = setup.peers if len(chosen) == len(names) else None
    config = setup.config
    sim = Probe.start(setup.method, setup.task, federation, config.plan(), len(chosen), config.seed, place=place)
    sim.most = steps
    return sim


def spread(federation: Federation, number: int) -> list[int]:
    """Choose clients from the largest to the smallest, in order of their ids."""
    by_size = sorted(range(len(federation.names)), key=federation.rank.__getitem__)
    if number >= len(by_size):
        return sorted(by_size)
    if number == 1:
        return [by_size[len(by_size) // 2]]
    return sorted(by_size[round(i * (len(by_size) - 1) / (number - 1))] for i in range(number))


def engine_of(setup: Setup, sim: Probe) -> Engine:
    """Return the faster engine for the probe, or the one that always works if clients cannot be stacked."""
    if setup.task.convolves:
        return Engine("loop")
    stacked = Engine("stacked", chunk=MAX_CLIENTS)
    fn, ids, rows_of = dataclasses.replace(sim, most=1).probe()
    try:
        stacked.map(fn, sim.federation, ids[:2], rows_of, "probe")
    except RuntimeError:
        return Engine("loop")
    return stacked


class Pull(NamedTuple):
    """Describe how the terms that a method adds to the loss act in the second round; medians over clients."""

    strength: float  # of what they add, relative to the data's gradient
    movement: float | None  # how far a model moves, relative to how far it would without them; None: not at all
    reach: float  # the strength, if it grows in proportion to the steps up to the end of a round


class Path:
    """What one optimiser was given, from its `init` on."""

    def __init__(self, start: Params) -> None:
        self.start, self.end = start, start
        self.data = self.added = tree.map(torch.zeros_like, start)

    def strength(self) -> float:
        """Return ||sum p|| / ||sum d||, which is 0 if only rounding was added."""
        data, added = _norm(self.data), _norm(self.added)
        return added / data if added > ROUNDING * data else 0.0

    def length(self) -> float:
        """Return how far it moved its model."""
        return _norm(tree.map(torch.sub, self.end, self.start))


class Unwatchable(Exception):
    """What an optimiser trains is not the model's parameters."""


class Watch(Optimizer):
    """An optimiser that takes another one's steps and notes what they are made of.

    Args:
        inner: takes the steps.
        task: whose loss is the data's part.
        alone: take steps by the data's part alone.
    """

    def __init__(self, inner: Optimizer, task: Task, *, alone: bool) -> None:
        self.inner, self.alone, self.plain = inner, alone, task
        self.task = _WatchedTask(task)
        self.paths: list[Path] = []

    @property
    def lr(self) -> float:  # type: ignore[override]
        return self.inner.lr

    @property
    def at_full_pace(self) -> Optimizer:
        return self.inner.at_full_pace

    def steady_step(self) -> float | None:
        return self.inner.steady_step()

    def init(self, params: Params) -> Tree:
        self.paths.append(Path(params))
        return self.inner.init(params)

    def update(self, grads: Params, state: Any, params: Params) -> tuple[Params, Tree]:
        if not self.task.seen or not params.keys() <= self.task.seen[-1][0].keys():
            raise Unwatchable  # it trains something else than the model, such as the spreads of its weights
        seen, batch = self.task.seen[-1]
        rest = {name: value for name, value in seen.items() if name not in params}
        data = grad(lambda own: self.plain.loss({**rest, **own}, batch)[0])(params)
        new, state = self.inner.update(data if self.alone else grads, state, params)
        path = self.paths[-1]
        path.data, path.end = tree.add(path.data, data), new
        path.added = tree.add(path.added, tree.map(torch.sub, grads, data))
        return new, state


class _WatchedTask(Task):
    """The same task, which remembers what it was last asked; it equals no other, so nothing is shared with a run."""

    def __init__(self, task: Task) -> None:
        self.__dict__.update(task.__dict__)
        self.seen: list[Seen] = []

    def _train_pass(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        self.seen[:] = [(params, batch)]
        return super()._train_pass(params, batch)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def pull_of(sim: Probe, round: int, clients: Sequence[int]) -> Pull | None:
    """Measure the terms that the method adds to the loss, in what some clients would do in `round`.

    Args:
        sim: as it is before the round; it is not changed.
        round: the number of the round.
        clients: who is watched, one at a time.

    Returns:
        The pull; None if the method has no optimiser to watch, or hides its steps in a `vmap` of its own.
    """
    if not isinstance(getattr(sim.method, "optimizer", None), Optimizer):
        return None
    strengths, movements, reaches = [], [], []
    for client in clients:
        paths, free = (_watched(sim, round, client, alone=alone) for alone in (False, True))
        if not paths or not free:
            return None
        # Training without such terms (Ditto's of the global model) is left out, unless there is nothing else.
        acting = [each for each in paths if each.strength()] or paths
        beside = [other for each, other in zip(paths, free, strict=False) if each in acting]
        strengths.append(median(each.strength() for each in acting))
        lengths = median(each.length() for each in acting), median(each.length() for each in beside)
        movements += [lengths[0] / lengths[1]] if lengths[1] else []
        reaches.append(strengths[-1] * sim.plan.num_steps(sim.federation.sizes[client]) / sim.steps(client))
    return Pull(median(strengths), median(movements) if movements else None, median(reaches))


def progress_of(sim: Probe, before: Tree, after: Tree, round: int, clients: Sequence[int]) -> float | None:
    """Measure how far `round` moved what clients deploy, relative to training alone; the median over `clients`.

    Args:
        sim: the simulation.
        before: all clients' views before the round, as rows.
        after: the same after the round.
        round: its number.
        clients: who is looked at.

    Returns:
        The ratio; None if a view is not one model, or training alone does not move it.
    """
    names = sim.task.trainable
    if not isinstance(before, dict) or not names <= before.keys() or not hasattr(sim.method, "optimizer"):
        return None
    ratios = []
    for client in clients:
        begin, end = tree.rows(before, client), tree.rows(after, client)
        alone = sim.alone(before, round, client)
        moved, free = (_norm({name: each[name] - begin[name] for name in names}) for each in (end, alone))
        ratios += [moved / free] if free else []
    return median(ratios) if ratios else None


def _watched(sim: Probe, round: int, client: int, *, alone: bool) -> list[Path]:
    """Let one client do its work of a round; return what its optimisers were given, nothing if that cannot be seen."""
    method: Any = sim.method
    watch = Watch(method.optimizer.unguarded, sim.task, alone=alone)
    watched = dataclasses.replace(sim, method=with_optimizer(method, watch), task=watch.task)
    fn, _, rows_of = watched.probe(round)
    try:
        Engine("loop").map(fn, sim.federation, [client], rows_of, purpose="probe")
        for path in watch.paths:
            path.strength(), path.length()
    except (RuntimeError, Unwatchable):  # of `vmap`: numbers of many clients, or models, at once are no plain tensors
        return []
    return watch.paths


def _norm(values: Params) -> float:
    return float(torch.stack([value.double().square().sum() for value in values.values()]).sum().sqrt())
