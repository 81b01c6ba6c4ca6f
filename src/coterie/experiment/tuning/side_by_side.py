"""Train candidates side by side: their clients share chunks, each with the numbers of its own candidate.

Candidates whose settings differ in numbers only (a step size, the strength of a penalty) take the same steps with other
numbers. So their simulations take turns (`several/turns.py`), and what they ask for is done on the clients of all of
them as one piece of work (`several/merged.py`), in which the numbers are part of a client's rows (`WithNumbers`).

Not every method reads its numbers in a way that admits this: one may branch on a strength, or hand it to a step as part
of the step's code. So `agree` computes the first steps of two candidates both ways before any are trained side by side.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.tree import Tree
from coterie.data.federation import Federation
from coterie.engine import ClientRunner, Engine, Rows
from coterie.engine.autotune import first_steps
from coterie.engine.engine import Results
from coterie.experiment.pick_engine import Work
from coterie.experiment.several.merged import MergedFederation
from coterie.experiment.several.turns import RunThread, take_turns
from coterie.experiment.simulation import Simulation
from coterie.experiment.tuning.space import Values, with_values

CHECKED_STEPS = 2
TOLERANCE = (
    1e-3  # of what two steps give, relative to the largest value: rounding is far below, another number far above
)


def numbers_of(values: Values) -> dict[str, float]:
    """Return the values that can be part of a client's rows."""
    return {name: value for name, value in values.items() if type(value) is float}


def kind_of(values: Values) -> Hashable:
    """Return what two candidates must have in common to be trained side by side."""
    numbers = numbers_of(values)
    return tuple((name, "a number" if name in numbers else value) for name, value in values.items())


@dataclasses.dataclass(frozen=True, eq=False, repr=False)  # `vmap` asks what it maps for a name: else all data in words
class WithNumbers:
    """Do for one client what a simulation does, by a method with the numbers that come with the client's rows."""

    sim: Simulation
    what: str  # the name of the simulation's function

    @property
    def __name__(self) -> str:
        """Return a name: `vmap` would otherwise write out all that a simulation holds, at every call."""
        return self.what

    def __call__(self, numbers: dict[str, Tensor], *rest: Any) -> Any:
        method = with_values(self.sim.method, numbers)
        return getattr(dataclasses.replace(self.sim, method=method), self.what)(*rest)


class Numbered(ClientRunner):
    """Stand for an engine to a simulation, whose clients are given numbers of their own in their rows."""

    def __init__(self, inner: ClientRunner, numbers: dict[str, float]) -> None:
        self._inner, self._numbers = inner, numbers
        self._known: dict[str, WithNumbers] = {}  # worker processes know a function when they are given the same again

    def map(
        self,
        fn: Callable[..., Any],
        federation: Federation,
        ids: Sequence[int],
        rows_of: Callable[[list[int]], Rows],
        purpose: str,
    ) -> Results:
        """Pass the work of `Engine.map` on."""
        return self._inner.map(*self.work(fn, federation, ids, rows_of, purpose))

    def work(
        self,
        fn: Any,
        federation: Federation,
        ids: Sequence[int],
        rows_of: Callable[[list[int]], Rows],
        purpose: str,
    ) -> Work:
        """Return work that is given the numbers."""

        def rows(group: list[int]) -> Rows:
            parts, batches = rows_of(group)
            device = federation.x.device
            return ({k: torch.full((len(group),), v, device=device) for k, v in self._numbers.items()}, *parts), batches

        known = self._known.setdefault(fn.__name__, WithNumbers(fn.__self__, fn.__name__))
        return Work(known, federation, ids, rows, purpose)


def side_by_side(
    works: Sequence[Callable[[ClientRunner], Any]], sims: Sequence[Simulation], values: Sequence[Values], engine: Engine
) -> list[Any]:
    """Call each function with its engine, in turns, and do what all of them ask for as one piece of work.

    Args:
        works: train the simulations, one each.
        sims: of candidates of one kind.
        values: of the candidates.
        engine: stacks the clients of all of them.

    Returns:
        What the functions return.
    """
    merged = MergedFederation([sim.federation for sim in sims])
    merged.engine = engine

    def begin(work: Callable[[ClientRunner], Any], own: Values, thread: RunThread) -> Any:
        return work(Numbered(thread, numbers_of(own)))

    given = [functools.partial(begin, work, own) for work, own in zip(works, values, strict=True)]
    return take_turns(given, lambda asked: merged.answer(asked, lambda _: None))


def merged_probe(sims: Sequence[Simulation], values: Sequence[Values]) -> Work:
    """Return the first round's work of all candidates as one, for an engine to be timed on."""
    return _merged(sims, values, [sim.probe() for sim in sims])


def agree(sims: Sequence[Simulation], values: Sequence[Values]) -> bool:
    """Tell whether two candidates compute side by side what they compute alone, by one client's first steps."""
    sims, values = sims[:2], values[:2]
    for asked in ([sim.probe() for sim in sims], [sim.probe_evaluation() for sim in sims]):
        shortened = [(fn, ids[:1], functools.partial(_shortened, rows_of)) for fn, ids, rows_of in asked]
        alone = [
            Engine("stacked", chunk=1).map(fn, sim.federation, ids, rows_of, "probe")[0][1]
            for sim, (fn, ids, rows_of) in zip(sims, shortened, strict=True)
        ]
        try:
            together = Engine("stacked", chunk=2).map(*_merged(sims, values, shortened))
        except (RuntimeError, TypeError, ValueError):  # what PyTorch and `scan` raise where numbers must be known
            return False
        rows = {client: (out, place) for group, out in together for place, client in enumerate(group)}
        ordered = [rows[client] for client in sorted(rows)]
        if not all(
            _close(one, tree.rows(out, torch.tensor([at]))) for one, (out, at) in zip(alone, ordered, strict=True)
        ):
            return False
    return True


def _merged(sims: Sequence[Simulation], values: Sequence[Values], asked: Sequence[tuple[Any, list[int], Any]]) -> Work:
    merged = MergedFederation([sim.federation for sim in sims])
    works = {
        k: Numbered(Engine(), numbers_of(own)).work(fn, sim.federation, ids, rows_of, "probe")
        for k, (sim, own, (fn, ids, rows_of)) in enumerate(zip(sims, values, asked, strict=True))
    }
    return merged.union(works)


def _shortened(rows_of: Callable[[list[int]], Rows], group: list[int]) -> Rows:
    rows, batches = rows_of(group)
    return rows, first_steps(batches, CHECKED_STEPS)


def _close(one: Tree, other: Tree) -> bool:
    """Tell whether two results are equal but for rounding."""
    pairs = zip(tree.leaves(one), tree.leaves(other), strict=True)
    return all(a.shape == b.shape and _near(a.double(), b.double()) for a, b in pairs)


def _near(a: Tensor, b: Tensor) -> bool:
    scale = float(torch.nan_to_num(a, posinf=0.0, neginf=0.0).abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=0, atol=TOLERANCE * scale, equal_nan=True)
