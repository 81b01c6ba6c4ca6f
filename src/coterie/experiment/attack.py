"""Attacks: what hostile clients of a simulated federation do to the honest ones.

A hostile client takes part in every round like any other, but what it sends is false. The attacks, on the message w_i
that the client would have sent, with w the model it was sent, m and s the mean and standard deviation of the honest
clients' messages, number by number:

    label-flip    it trains on its data with label y as C - 1 - y, and sends what it gets   (`flip_labels`)
    sign-flip     w - (w_i - w): the step in the other direction                            (`sign_flip`)
    scaled        w - 10 (w_i - w): ten times that                                          (`scaled`)
    gaussian      m + 10 s e, with e standard normal                                        (`gaussian`)
    little        m - 1.5 s: so little that it hides among the honest ones                  (`little`; Baruch 2019)
    copy          an honest client's message, half of the way to its nearest honest one,    (`copied`)
                  but in the direction against that client's step: always the most similar
    absent        it takes no part at all: what the honest clients have without it          (`without`)

`absent` is no attack but what the others are to be compared with: data that hostile clients do not share are lost
whatever the defence. What is sent is finite, and no longer than a server accepts. Hostile clients know the honest ones'
messages of the round, and work together. Only the models in a message are false: numbers of examples and log-weights
are what the method makes them. Parts that are written to single clients (`coterie.core.routes.Addressed`) are steps,
and are taken for w_i - w.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.compute.availability import unavailable
from coterie.core import rng, routes, tree
from coterie.core.errors import ConfigError
from coterie.core.tree import Params, Tree
from coterie.data import Federation
from coterie.engine import Engine
from coterie.experiment.building import Model
from coterie.experiment.debugging import debugging
from coterie.experiment.federations import Data
from coterie.experiment.setup import Setup, prepare
from coterie.experiment.simulation import Simulation
from coterie.methods.fields import AnyMethod

NORM_BOUND = 1e6  # of a false model: what servers refuse beyond (`deploy.norm_bound`)
SCALE = 10.0  # times its step that a client sends, in `scaled`; times the spread, in `gaussian`
LITTLE = 1.5  # standard deviations
COPIED = 0.5  # of the distance to the nearest honest client

# (the models [clients, numbers], those they were sent, which clients are hostile, a generator) -> false models
Forgery = Callable[[Tensor, Tensor, Tensor, torch.Generator], Tensor]


def sign_flip(w: Tensor, sent: Tensor, hostile: Tensor, draw: torch.Generator) -> Tensor:
    """Take the step in the other direction."""
    return 2 * sent[hostile] - w[hostile]


def scaled(w: Tensor, sent: Tensor, hostile: Tensor, draw: torch.Generator) -> Tensor:
    """Take it so, and `SCALE` times as far."""
    return sent[hostile] - SCALE * (w[hostile] - sent[hostile])


def gaussian(w: Tensor, sent: Tensor, hostile: Tensor, draw: torch.Generator) -> Tensor:
    """Say noise around the honest mean."""
    honest = w[~hostile]
    noise = torch.randn(w[hostile].shape, generator=draw, dtype=w.dtype)
    return honest.mean(0) + SCALE * honest.std(0, correction=0) * noise


def little(w: Tensor, sent: Tensor, hostile: Tensor, draw: torch.Generator) -> Tensor:
    """Say what an honest client might, a little to one side."""
    honest = w[~hostile]
    return (honest.mean(0) - LITTLE * honest.std(0, correction=0)).expand_as(w[hostile])


def copied(w: Tensor, sent: Tensor, hostile: Tensor, draw: torch.Generator) -> Tensor:
    """Follow an honest client closely, against its step."""
    honest, step = w[~hostile], w[~hostile] - sent[~hostile]
    if len(honest) < 2:
        return w[hostile]
    far = torch.cdist(honest, honest, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf)
    victim = torch.arange(int(hostile.sum())) % len(honest)
    against = -step[victim] / step[victim].norm(dim=1, keepdim=True).clamp_min(torch.finfo(w.dtype).tiny)
    half_way = COPIED * far[victim].min(1, keepdim=True).values
    found: Tensor = honest[victim] + half_way * against
    return found


MESSAGES: Mapping[str, Forgery] = {
    "sign-flip": sign_flip,
    "scaled": scaled,
    "gaussian": gaussian,
    "little": little,
    "copy": copied,
}
ATTACKS = ("label-flip", *MESSAGES)
ABSENT = "absent"


def tampering(attack: str, hostile: Sequence[int], seed: int) -> Callable[[int, list[int], Tree, Tree], Tree]:
    """Return what `Simulation.tamper` is: the messages of a round, with those of hostile clients replaced."""
    forge = MESSAGES[attack]

    def tamper(round: int, ids: list[int], down: Tree, ups: Tree) -> Tree:
        there = torch.tensor([i in hostile for i in ids])
        if not there.any() or there.all():
            return ups
        draw = rng.torch_generator(seed, "attack", round)
        references = [] if isinstance(ups, routes.Addressed) else list(_models(down))

        def replaced(models: Params) -> Params:
            real = {name: leaf for name, leaf in models.items() if leaf.is_floating_point()}
            if not real:
                return models
            sent = next((found for found in references if _covers(found, real)), None)
            start = {name: torch.zeros_like(leaf) if sent is None else sent[name] for name, leaf in real.items()}
            w, before = _flat(real), _flat(start)
            # A hostile client whose own training diverged, under its own attack, knows what an honest one would send.
            w = torch.where(there[:, None] & ~w.isfinite().all(1, keepdim=True), w[~there].mean(0), w)
            w = w.index_copy(0, there.nonzero().flatten(), _bounded(forge(w, before, there, draw)).to(w.dtype))
            pieces = torch.split(w, [leaf[0].numel() for leaf in real.values()], 1)
            whole = zip(real.items(), pieces, strict=True)
            return {**models, **{name: piece.reshape(leaf.shape).to(leaf.dtype) for (name, leaf), piece in whole}}

        return tree.map(lambda leaf: _finite_where(there, leaf), _each_model(ups, replaced))

    return tamper


def _bounded(w: Tensor) -> Tensor:
    """Shorten models whose norm a server would refuse."""
    shorter: Tensor = NORM_BOUND / w.norm(dim=1, keepdim=True).clamp_min(NORM_BOUND)
    return w * shorter


def _finite_where(hostile: Tensor, leaf: Tensor) -> Tensor:
    """Replace what is not finite in hostile clients' rows, which would be refused, too."""
    if not leaf.is_floating_point() or bool(leaf[hostile].isfinite().all()):
        return leaf
    return leaf.index_copy(0, hostile.nonzero().flatten(), leaf[hostile].nan_to_num(0.0, 0.0, 0.0))


def flip_labels(federation: Federation, hostile: Sequence[int]) -> Federation:
    """Return the federation with the training labels of hostile clients turned round: C - 1 - y.

    Raises:
        ConfigError: there are no classes to turn round.
    """
    if federation.num_classes is None:
        raise ConfigError([f"label-flip: this is {federation.target.words}, which has no classes to turn round"])
    y = federation.y.clone()
    for i in hostile:
        at = torch.from_numpy(np.asarray(federation.split(i).train))
        y[at] = federation.num_classes - 1 - y[at]
    return dataclasses.replace(federation, y=y)


def without(federation: Federation, hostile: Sequence[int]) -> Federation:
    """Return the federation of the honest clients."""
    names = {federation.names[i] for i in hostile}
    return dataclasses.replace(federation, clients={n: s for n, s in federation.clients.items() if n not in names})


class Attacked(NamedTuple):
    """What the honest clients' models are worth at the end."""

    metric: str
    honest: tuple[str, ...]
    hostile: tuple[str, ...]
    scores: np.ndarray[Any, np.dtype[np.float64]]  # [honest clients], on test data; means over the last rounds

    @property
    def mean(self) -> float:
        """The mean over the honest clients."""
        return float(np.nanmean(self.scores))


def attack(
    attack: str | None,
    hostile: int,
    method: str | AnyMethod | None = None,
    data: Data | None = None,
    *,
    model: Model | None = None,
    last: int = 1,
    **settings: Any,
) -> Attacked:
    """Train a federation of which some clients are hostile, and score the honest ones at the end.

    Who is hostile depends on the clients' names and the seed, so that it is the same for every method and attack.

    Args:
        attack: one of `ATTACKS`; "absent": the hostile clients take no part; None: they are as honest as the others,
            but are not scored either.
        hostile: how many clients are hostile.
        method: as in `coterie.run`.
        data: as in `coterie.run`.
        model: as in `coterie.run`.
        last: after how many of the last rounds they are scored. The mean over some is less a matter of chance than the
            score after the very last.
        **settings: as in `coterie.run`; `robust` is the defence.

    Raises:
        ConfigError: there is no such attack, or nobody would be honest.

    Examples:
        >>> import coterie
        >>> found = coterie.attack("sign-flip", 2, "fedavg", "hospitals", model="linear", rounds=2, robust="median")
        >>> len(found.honest), len(found.hostile)
        (6, 2)
        >>> 0 < found.mean < 1
        True
    """
    check_attacks([] if attack is None else [attack])
    setup = prepare(method, data, model=model, **settings)
    return attack_setup(setup, attack, hostile_clients(setup, hostile), last)


def check_attacks(names: Sequence[str]) -> Sequence[str]:
    """Return the names of attacks as they are.

    Raises:
        ConfigError: there is no such attack.
    """
    if unknown := [name for name in names if name not in (*ATTACKS, ABSENT)]:
        raise ConfigError([f"there is no attack '{unknown[0]}'; there are {', '.join(ATTACKS)}"])
    return names


def hostile_clients(setup: Setup, number: int) -> list[int]:
    """Return which clients are hostile, drawn by their names.

    Raises:
        ConfigError: nobody would be hostile, or nobody honest.
    """
    names, seed = setup.federation.names, setup.config.seed
    if not 0 < number < len(names):
        raise ConfigError([f"hostile = {number}: of {len(names)} clients, between 1 and {len(names) - 1} are hostile"])
    return sorted(sorted(range(len(names)), key=lambda i: rng.seed_of(seed, "hostile", names[i]))[:number])


def attack_setup(setup: Setup, attack: str | None, hostile: Sequence[int], last: int = 1) -> Attacked:
    """Do the same with a run that is prepared, and these clients hostile.

    Raises:
        ConfigError: there are not so many rounds, or it would stop early.
    """
    config, federation = setup.config, setup.federation
    if not 0 < last <= config.rounds:
        raise ConfigError([f"last = {last}: of {config.rounds} rounds, between 1 and {config.rounds} are scored"])
    if config.early_stop is not None or config.callbacks:
        raise ConfigError(["an attack is judged after the last planned round: leave out early_stop and callbacks"])
    names = federation.names
    honest = [i for i in range(len(names)) if i not in hostile]
    if attack == "label-flip":
        federation = flip_labels(federation, hostile)
    if attack == ABSENT:
        federation = without(federation, hostile)
    participants = config.participants(len(federation.names))
    sim = Simulation.start(
        setup.method, setup.one_task(), federation, config.plan(), participants, config.seed, place=setup.peers
    )
    sim.shares, sim.heard, sim.sampler = setup.shares, config.clients_heard, config.sampler
    if attack is not None and attack in MESSAGES:
        sim.tamper, sim.hostile = tampering(attack, hostile, config.seed), frozenset(hostile)
    compiled = not unavailable() if config.compile is None else config.compile
    engine = Engine("stacked" if config.engine == "auto" else config.engine, compiled)
    found = []
    with debugging(config):
        for number in range(1, config.rounds + 1):
            sim.train(number, engine)
            if number > config.rounds - last:
                found.append(sim.evaluate(number, engine)["test"][setup.metric])
    scores = np.mean(np.asarray(found, dtype=np.float64), 0)
    if attack != ABSENT:
        scores = scores[honest]
    return Attacked(setup.metric, tuple(names[i] for i in honest), tuple(names[i] for i in hostile), scores)


def _covers(found: Params, real: Params) -> bool:
    return all(name in found and found[name].shape == leaf.shape for name, leaf in real.items())


def _flat(models: Params) -> Tensor:
    return torch.cat([leaf.reshape(len(leaf), -1).double() for leaf in models.values()], 1)


def _models(node: Tree) -> list[Params]:
    """Return all dicts of tensors in a tree."""
    if isinstance(node, dict):
        return [node] if all(isinstance(each, Tensor) for each in node.values()) else []
    return [found for child in node for found in _models(child)] if isinstance(node, tuple) else []


def _each_model(node: Tree, change: Callable[[Params], Params]) -> Any:
    """Return the tree with every dict of tensors changed."""
    if isinstance(node, dict):
        return change(node)
    if isinstance(node, tuple):
        children = [_each_model(child, change) for child in node]
        return type(node)(*children) if hasattr(node, "_fields") else tuple(children)
    return node
