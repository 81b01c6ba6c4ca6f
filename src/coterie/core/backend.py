"""Who runs the scans: a back-end.

`Plain` (in `coterie.core.plain`) is ordinary PyTorch, always there, and what every other back-end must agree with.
Whoever knows of a faster one activates it for a while:

    with using(backend):
        ...                     # every `scan` inside runs on `backend`

The core only asks for the `current` one, and imports none of those that exist for speed (`coterie.compute`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from coterie.core.plain import Plain

if TYPE_CHECKING:
    from coterie.core.scan import Program


class Backend(Protocol):
    def scan(
        self, program: Program, carry: list[Tensor], fixed: list[Tensor], time: tuple[Tensor, ...]
    ) -> list[Tensor]:
        """Fold a lifted step over minibatches.

        With n lifts, a leaf that has a client axis for each of them is [c_n, ..., c_1, ...]; in `fixed`, a leaf has
        the axes that `program.lifts` says.

        Args:
            program: the step, and how it has been lifted over clients.
            carry: the leaves to begin with, each with all client axes. They are not changed.
            fixed: the leaves of `aux`, and then the pools x and y.
            time: positions in the pool, mask and key (and pace, if `program.paced`) of all minibatches,
                [clients ..., steps, ...].

        Returns:
            The leaves of the carry after the last step. One that no step changes may be the tensor that was given.
        """


_current: ContextVar[Backend] = ContextVar("backend")
_PLAIN = Plain()


def current() -> Backend:
    """Return the back-end of the innermost `using`; outside of all, the plain one."""
    return _current.get(_PLAIN)


@contextlib.contextmanager
def using(backend: Backend) -> Iterator[None]:
    """Run the scans inside on `backend`."""
    token = _current.set(backend)
    try:
        yield
    finally:
        _current.reset(token)
