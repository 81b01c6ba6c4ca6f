"""Where a client's training left the finite numbers: its local update once more, watched step by step.

It is done only after a round in which training diverged, one client on the plain back-end, so that no other round pays
for it.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.backend import using
from coterie.core.batches import Batch, Batches
from coterie.core.plain import Plain
from coterie.core.scan import Program, Runner
from coterie.core.task import Task
from coterie.core.tree import Tree
from coterie.engine.loop import loop

DIVERGED = "training diverged"  # how the error begins


class Step(NamedTuple):
    """The first step that made a finite number infinite or NaN."""

    number: int  # from 1, in its scan
    scan: int  # which scan of the update it is in, from 1, of those that train
    last: float | None  # the last finite training loss until then
    finite_inputs: bool


@dataclass(frozen=True)
class Divergence:
    """Where training left the finite numbers, and with which losses."""

    step: Step | None  # None: every step stayed finite
    steps: int  # of its scan
    first: float | None  # the loss of the first step, if it is known and finite
    last: float | None  # the last finite loss
    again: bool  # whether the repeated update gives NaN or infinite values, too

    def in_words(self) -> str:
        """Return how the sentence goes on that names the client and the round."""
        loss = "" if self.last is None else f"; the last finite loss was {self.last:.4g}"
        if self.last is not None and self.first is not None and self.first != self.last:
            loss += f" (of the round's first step: {self.first:.4g})"
        if self.step is not None:
            which = f" of its training pass {self.step.scan}" if self.step.scan > 1 else ""
            return f", from step {self.step.number} of {self.steps}{which} on{loss}"
        if self.again:
            return f", but every step stays finite: they come from what the method computes beside its steps{loss}"
        return f", but not when its steps are repeated one by one in plain PyTorch{loss}"

    def advice(self) -> str:
        """Return what to look at before the learning rate; empty: nothing else."""
        if self.step is not None and not self.step.finite_inputs:
            return "The inputs of that step have NaN or infinite values: look at this client's data. "
        if self.step is None and self.again:
            return "To stop in the method's code, add breakpoint() there and run with --debug. "
        if self.step is not None and self.step.number == 1 and self.last is None:
            return "The loss of the first step is not finite, so the model was too far off when the round began. "
        return ""


def find_divergence(
    update: Callable[[Task, Tree, Tree, Batches], Any], task: Task, rows: tuple[tuple[Tree, ...], Batches]
) -> Divergence | None:
    """Repeat the local update of one client, and watch its steps.

    Args:
        update: the method's `local_update`.
        task: the model and its loss.
        rows: what the client was given: its state and message, and its minibatches, as an engine gathers them.

    Returns:
        What was found; None if the update cannot be repeated.
    """
    watch = _Watch()
    watched = copy.copy(task)
    vars(watched)["batch_loss"] = watch.telling(task.batch_loss)  # of this copy alone
    try:
        with using(watch):
            result = loop(lambda *row: update(watched, *row), *rows)
    except Exception:  # the numbers may be such that a routine refuses them
        if not watch.found:
            return None
        result = ()
    # What is only measured in between (a loss of a model that is then not taken) may be infinite without harm.
    step = watch.found.get(True) or watch.found.get(False)
    finite = [loss for loss in watch.losses if math.isfinite(loss)]
    first = watch.losses[0] if watch.losses and math.isfinite(watch.losses[0]) else None
    steps = watch.lengths[step.scan] if step else 0
    last = step.last if step else finite[-1] if finite else None
    return Divergence(step, steps, first, last, bool(step) or not all(map(_finite, tree.leaves(result))))


def first_not_finite(ids: Sequence[int], reported: Sequence[Tensor]) -> int | None:
    """Return the first of `ids` that reports NaN or infinite values, or None.

    Args:
        ids: the clients.
        reported: what they report, a row for each of them.
    """
    if math.isfinite(sum(float(leaf.sum()) for leaf in reported)):  # then all of them are; one pass, no copy
        return None
    for leaf in reported:
        bad = ~torch.isfinite(leaf.reshape(len(ids), -1)).all(1)
        if bool(bad.any()):
            return ids[int(bad.nonzero()[0])]
    return None


def told(found: Divergence | None, method: Any, client: str, round: int) -> str:
    """Return the error in words: who diverged in which round and step, and what to try."""
    where, advice = (found.in_words(), found.advice()) if found else ("", "")
    optimizer = getattr(method, "optimizer", None)
    lr = getattr(getattr(optimizer, "at_full_pace", optimizer), "lr", None)
    now = f", now {lr:g}" if isinstance(lr, float | int) else ""
    return (
        f"{DIVERGED}: client '{client}' has NaN or infinite values in round {round}{where}. {advice}"
        f"Try a smaller learning rate (--lr{now}); "
        "the checkpoints before this round are kept."
    )


@dataclass
class _Watch(Plain):
    """The plain back-end, which notes losses, and the first steps that leave the finite numbers."""

    losses: list[float] = field(default_factory=list)  # of training steps, in order
    found: dict[bool, Step] = field(default_factory=dict)  # by whether the step trains
    lengths: dict[int, int] = field(default_factory=dict)  # steps of each scan that trains; 0 is any other
    trained: int = 0  # scans that told losses

    def telling(self, batch_loss: Callable[[Tensor, Batch], Tensor]) -> Callable[[Tensor, Batch], Tensor]:
        """Return the same training loss, which notes its values."""

        def told(outputs: Tensor, batch: Batch) -> Tensor:
            loss = batch_loss(outputs, batch)
            with contextlib.suppress(RuntimeError):  # inside a `vmap` of the method's own there are no values
                self.losses.append(float(loss.detach()))
            return loss

        return told

    def steps(self, program: Program, select: bool) -> Runner:
        step, taken, begun = program.function(select), 0, len(self.losses)

        def watched(*flat: Tensor) -> list[Tensor]:
            nonlocal taken
            told, taken = len(self.losses), taken + 1
            new = step(*flat)
            trains = len(self.losses) > told
            if trains and told == begun:
                self.trained += 1
            scan = self.trained if trains else 0
            self.lengths[scan] = taken
            # A method may carry an infinity from the start, such as the smallest loss so far.
            left = any(_finite(old) and not _finite(leaf) for old, leaf in zip(flat, new, strict=False))
            if trains not in self.found and (left or not all(map(math.isfinite, self.losses[told:]))):
                finite = [loss for loss in self.losses if math.isfinite(loss)]
                self.found[trains] = Step(
                    taken, scan, finite[-1] if finite else None, _finite(flat[-program.num_time - 1])
                )
            return new

        return watched


def _finite(leaf: Tensor) -> bool:
    return bool(torch.isfinite(leaf).all())
