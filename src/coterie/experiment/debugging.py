"""A run in which breakpoints work: in one process and thread, one client at a time, nothing compiled."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from coterie.compute.cpu import one_core
from coterie.core.errors import CoterieWarning
from coterie.experiment.config import Config

WORDS = (
    "debug: clients run one at a time, uncompiled, in this process and thread, so that breakpoint() stops in methods, "
    "models and losses; the run is slow, and its results are the same up to rounding"
)


@contextlib.contextmanager
def debugging(config: Config) -> Iterator[None]:
    """Share no work out inside, if the configuration asks for debugging, and say so.

    `resolve` has set the engine then; what is left are the threads and processes that other work is shared out among.
    """
    if not config.debug:
        yield
        return
    warnings.warn(WORDS, CoterieWarning, stacklevel=4)
    with one_core():
        yield
