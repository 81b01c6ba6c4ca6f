"""The pace of a step: what the optimiser's step size is multiplied by while a learning rate has a schedule.

A schedule (`coterie.core.schedules`) gives every minibatch a pace, a number that comes to the step as a value, so that
steps of all rounds are the same code. `scan` sets it while it calls a step, and `coterie.core.optimizers.Paced` reads
it: a method's own step, whatever it does with its optimiser, takes steps of the right size without knowing of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from torch import Tensor

Pace = Tensor | tuple[()]

_current: ContextVar[Pace | None] = ContextVar("pace", default=None)


@contextlib.contextmanager
def at_pace(pace: Pace) -> Iterator[None]:
    """Set the pace of the step that is called inside; () stands for 1."""
    token = _current.set(pace)
    try:
        yield
    finally:
        _current.reset(token)


def current_pace() -> Pace | None:
    """Return the pace of the step that is being taken; () stands for 1, and None for no step at all."""
    return _current.get()
