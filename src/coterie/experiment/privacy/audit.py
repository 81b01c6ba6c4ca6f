"""An audit: can somebody who sees the model tell who was in its training data, and what epsilon would that prove?

Canaries are examples with random labels, which a model can only get right by learning them by heart. Each is in the
training data with chance 1/2. An attacker who sees the trained model guesses that the canaries with the smallest losses
were, and those with the largest were not. A mechanism with epsilon lets no guess be right with a chance above
e^epsilon / (1 + e^epsilon), so many right guesses prove a large epsilon (Steinke, Nasr and Jagielski, 2023, with
delta = 0). What is proven should fall with the epsilon that the accountant claims, and stay below it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import binom
from torch import nn

from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.optimizers import SGD
from coterie.core.privacy import Guard, Private
from coterie.core.task import Task
from coterie.core.training import train
from coterie.data.federation import from_clients
from coterie.data.minibatches import Plan, draw
from coterie.experiment.privacy.accountant import Release, epsilon, find_noise

CONFIDENCE = 0.95


class Audit(NamedTuple):
    """What an attacker found."""

    claimed: float  # epsilon by the accountant
    advantage: float  # true positive rate less false positive rate, at the best threshold
    auc: float
    right: int  # of `guesses`
    guesses: int
    proven: float  # epsilon that is refuted to be smaller, with 95 % confidence


def audit(
    target: float, *, canaries: int = 400, width: int = 600, epochs: int = 20, seed: int = 0, delta: float = 1e-5
) -> Audit:
    """Train one linear model on canaries with privacy, and attack it.

    Args:
        target: the epsilon to claim; infinite for training without noise or clipping.
        canaries: how many there are, of which about half are trained on.
        width: numbers of an example. With more numbers than examples, the model learns all of them by heart.
        epochs: passes over the data, four minibatches each.
        seed: of canaries, membership, minibatches and noise.
        delta: of epsilon.

    Returns:
        How well the attacker did.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(canaries, width, generator=generator) / math.sqrt(width)
    y = torch.randint(2, (canaries,), generator=generator)
    member = torch.rand(canaries, generator=generator) < 0.5
    size, spare = int(member.sum()), 2  # examples that the federation wants for validation and test
    rows = torch.cat([member.nonzero().flatten(), (~member).nonzero().flatten()[:spare]])
    data = from_clients({"site": (x[rows], y[rows])}, validation=1, test=1, seed=seed)
    data.clients["site"].train[:] = np.arange(size)  # exactly the members
    batch = -(-size // 4)
    noise = 0.0
    if math.isfinite(target):
        noise = find_noise(lambda value: epsilon([Release(batch / size, value, 4 * epochs)], delta), target)
    guard = Guard(batch, 1.0 if noise else math.inf, noise)
    task = Task(nn.Linear(width, 2), num_classes=2)
    drawn = draw(data, [0], Plan(batch, epochs, poisson=True), seed=seed, purpose="audit", round=1)
    batches = Batches(drawn.x, drawn.y, *tree.rows(drawn[2:], 0))
    theta, _ = train(task, Private(SGD(2.0), guard), tree.map(torch.zeros_like, task.init()), batches)
    return judge(target, -task.losses(theta, x, y).numpy(), member.numpy())


def judge(target: float, score: np.ndarray, member: np.ndarray) -> Audit:
    """Return how well `score`, large for members, tells who they are; half of all are guessed."""
    order = np.argsort(score)
    number = len(order) // 4
    right = int(member[order[-number:]].sum() + (~member[order[:number]]).sum())
    thresholds = np.append(np.sort(score), np.inf)
    rates = [[(score[who] >= at).mean() for at in thresholds] for who in (member, ~member)]
    advantage = float(np.max(np.array(rates[0]) - np.array(rates[1])))
    inside, outside = score[member][:, None], score[~member][None]
    auc = float((inside > outside).mean() + 0.5 * (inside == outside).mean())
    return Audit(target, advantage, auc, right, 2 * number, proven_epsilon(right, 2 * number))


def proven_epsilon(right: int, guesses: int, confidence: float = CONFIDENCE) -> float:
    """Return the largest epsilon under which so many right guesses have a chance of at most 1 - confidence."""
    low, high = 0.0, 50.0
    if binom.sf(right - 1, guesses, 0.5) > 1 - confidence:
        return 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        chance = binom.sf(right - 1, guesses, 1 / (1 + math.exp(-middle)))
        low, high = (middle, high) if chance <= 1 - confidence else (low, middle)
    return low
