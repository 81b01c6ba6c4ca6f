"""The second half of law 4: whatever its options are, a method still learns where learning is easy.

An option that changes a bit may also have made the method useless: a prior so strong that no model leaves its start, a
step size that moves nothing. So every setting is trained on a federation on which every method should do well: four
clients with 32 training examples of the same four classes, which are balls of features that hardly overlap. There are
ten rounds of eight steps of SGD with step size 0.1. Training alone then has 94 % right and three tenths of the loss
that it had after the first round. A guess has 25 % right.

What is asked for is less: 70 % right, and three quarters of the first round's loss. The loss tells more than the
accuracy, which depends on the draw: models that have hardly left their start often order the classes well. With
FedMAP's first default for `prior = laplace`, which scored 50 % of two classes on the paper's data, 83 % of the loss was
left here, for each of five draws of the examples; with the other settings of all methods that learn, at most 69 %.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from coterie.core import rng
from coterie.core.errors import ConfigError, CoterieError, CoterieWarning
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.data.federation import Federation, Split
from coterie.data.minibatches import Plan
from coterie.engine import Engine
from coterie.experiment.simulation import Simulation
from coterie.methods.fields import AnyMethod, hyper_parameters
from coterie.testing.kit import LawBroken
from coterie.testing.options import changed, settings

CLASSES, FEATURES, CLIENTS = 4, 6, 4
TRAIN, VALIDATION, TEST = 32, 4, 25  # examples a client
LEARNING_ROUNDS = 10
LEARNING_PLAN = Plan(batch_size=8, epochs=2)
LEARNING_OPTIMIZER = SGD(0.1)
CHANCE = 1 / CLASSES
ENOUGH = CHANCE + 0.6 * (1 - CHANCE)  # accuracy after the last round: this much of the way from a guess to perfect
LEFT = 0.75  # of the first round's loss after the last, at most; unless it is
SMALL = math.log(CLASSES) / 4  # a quarter of a guess's, or less: then there was little to learn after the first round
DEFAULTS = "defaults"
SHOWN = 6  # settings that do not learn, of more


class Learned(NamedTuple):
    """Mean test accuracy and loss of the models that clients deploy, after the first round and after the last."""

    first_accuracy: float
    first_loss: float
    last_accuracy: float
    last_loss: float

    @property
    def complaint(self) -> str | None:
        """Return what is too little; None if nothing is."""
        if not self.last_accuracy >= ENOUGH:
            return (
                f"{self.last_accuracy:.0%} right after {LEARNING_ROUNDS} rounds, not {ENOUGH:.0%} (chance {CHANCE:.0%})"
            )
        if not self.last_loss <= max(LEFT * self.first_loss, SMALL):
            return (
                f"a loss of {self.last_loss:.3g} after {LEARNING_ROUNDS} rounds, not {LEFT:.0%} of the "
                f"{self.first_loss:.3g} after the first"
            )
        return None


@cache
def easy_federation() -> Federation:
    """Make the federation of this file: all clients have the same four classes, eight training examples of each."""
    generator = rng.torch_generator("learning", "x")
    each = TRAIN + VALIDATION + TEST
    y = torch.arange(CLIENTS * each) % CLASSES
    x = 2 * torch.eye(CLASSES, FEATURES)[y] + 0.6 * torch.randn(len(y), FEATURES, generator=generator)
    clients = {}
    for i in range(CLIENTS):
        own = np.arange(i * each, (i + 1) * each)
        clients[f"site-{i}"] = Split(*np.split(own, [TRAIN, TRAIN + VALIDATION]))
    return Federation("easy", x, y, clients, CLASSES)


@cache
def easy_task() -> Task:
    """Make a perceptron of 6, 8 and 4 units for `easy_federation`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Task(nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)), num_classes=CLASSES)


def learn(method: AnyMethod) -> Learned:
    """Train the method as it is (but for its optimiser, which is `LEARNING_OPTIMIZER`) on the easy federation.

    Raises:
        CoterieError: training diverged.
    """
    if hasattr(method, "optimizer"):
        method = changed(method, optimizer=LEARNING_OPTIMIZER)
    method = method.scheduled(LEARNING_ROUNDS)
    engine = Engine("stacked", chunk=CLIENTS)
    sim = Simulation.start(method, easy_task(), easy_federation(), LEARNING_PLAN, CLIENTS, seed=0)
    found: list[float] = []
    for number in range(1, LEARNING_ROUNDS + 1):
        sim.train(number, engine)
        if number in (1, LEARNING_ROUNDS):
            scores = sim.evaluate(number, engine)["test"]
            found += [float(np.mean(scores["accuracy"])), float(np.mean(scores["loss"]))]
    return Learned(*found)


def every_setting_learns(method: AnyMethod, everything: bool = True) -> str | None:
    """Check the second half of law 4.

    Args:
        method: the method.
        everything: also change numbers, and not only choices between words.

    Returns:
        Words about the settings that the method says are not meant to learn.

    Raises:
        LawBroken: with the settings that do not learn, and how far each came.
        ConfigError: the method's `not_meant_to_learn` names no option, or does not say why.
    """
    reasons = _reasons(method)
    broken, excused = [], []
    for name, setting in _all(method, everything):
        parts = name.split(", ")
        reason = next((reasons[key] for part in parts for key in (part, part.split(" = ")[0]) if key in reasons), None)
        if reason is not None:
            excused.append(f"{name} is not meant to learn: {reason}")
            continue
        with warnings.catch_warnings():  # a changed option may deserve one
            warnings.simplefilter("ignore", CoterieWarning)
            try:
                complaint = learn(setting).complaint
            except CoterieError as error:
                complaint = str(error)
        if complaint:
            broken.append(f"with {name}, the method does not learn: {complaint}")
    if broken:
        more = [f"and with {len(broken) - SHOWN} other settings"] if len(broken) > SHOWN else []
        raise LawBroken("; ".join([*broken[:SHOWN], *more]))
    return "; ".join(excused) or None


def _all(method: AnyMethod, everything: bool) -> Iterator[tuple[str, AnyMethod]]:
    yield DEFAULTS, method
    yield from settings(method, numbers=everything)


def _reasons(method: AnyMethod) -> dict[str, str]:
    owner, problems = type(method).__name__, []
    known = {DEFAULTS, *(hyper.name for hyper in hyper_parameters(type(method)))}
    for key, reason in method.not_meant_to_learn.items():
        if key.split(" = ")[0] not in known:
            problems.append(f"{owner}.not_meant_to_learn names '{key}', which is no option of it")
        if not isinstance(reason, str) or not reason.strip():
            problems.append(f"{owner}.not_meant_to_learn does not say why '{key}' is not")
    if problems:
        raise ConfigError(problems)
    return dict(method.not_meant_to_learn)
