"""Callbacks: a user's code that is called between the rounds of a run, and may end it.

A callback is an object with `on_round_end(run)` and, if it wants to, `on_start(run)`; a class that makes such objects,
whose parameters are its options (`--callback my_package:Stopper:patience=5`); or a function, which is `on_round_end`.
Each run has its own object. `run` is a `RunView`: it shows the records of all rounds so far, and what clients would
deploy now, as copies; `run.stop(why)` ends the run after this round.

What a callback remembers is not in the checkpoints. `on_start` is called before the first round of a new run, and of
one that is resumed with the records so far: from these it makes anew what it needs.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.errors import CoterieError, CoterieWarning
from coterie.data.federation import SplitName
from coterie.engine import ClientRunner
from coterie.experiment.records import score_of
from coterie.experiment.result import as_module
from coterie.experiment.setup import Setup
from coterie.experiment.simulation import Simulation
from coterie.experiment.stopping import Stop, early_stop

STOPPED_WITH_PRIVACY = (
    "{} stopped a run with privacy. When it stops is not covered by epsilon: if that depends on validation or test "
    "scores, or on losses, it tells of the examples"
)


class RunView:
    """A run between two rounds, as its callbacks see it. Nothing that it shows can change the run."""

    def __init__(self, setup: Setup, path: Path | None, sim: Simulation, engine: ClientRunner) -> None:
        config = setup.config
        self.method, self.data, self.seed, self.metric = config.method, config.data, config.seed, setup.metric
        self.rounds = config.rounds  # the planned ones
        self.clients = setup.federation.names
        self.path = path  # the run folder, or None
        self.records: tuple[Mapping[str, Any], ...] = ()  # of all rounds so far, as in rounds.jsonl
        self._average, self._setup, self._sim, self._engine = config.average, setup, sim, engine
        self._why: str | None = None

    @property
    def round(self) -> int:
        """The number of the round that is over; 0 before the first one."""
        return int(self.records[-1]["round"]) if self.records else 0

    def stop(self, why: str = "it asked for it") -> None:
        """End the run after this round (asked for in `on_start`: after the next one)."""
        self._why = str(why)

    def scores(self) -> list[tuple[int, float]]:
        """Return (round, validation score) of every evaluated round; higher is better, also for an error."""
        found = [record for record in self.records if "validation" in record]
        return [(record["round"], score_of(self.metric, self._average, record)) for record in found]

    def model(self, client: str) -> nn.Module:
        """Return a copy of the model that a client would deploy now, in evaluation mode."""
        sim, number = self._sim, self._number(client)
        task = sim.task if self._setup.mixed is None else self._setup.mixed.task(number)
        return as_module(task, sim.method, sim.view_of(number, self.round, self._engine))

    def shared_model(self) -> nn.Module | None:
        """Return a copy of the model for everybody, in evaluation mode; None if the method has none."""
        found = self._sim.shared_model()
        return None if found is None else self._sim.task.module(tree.rows(found, 0))

    def examples(self, client: str, split: SplitName = "validation") -> tuple[Tensor, Tensor]:
        """Return a copy of a client's inputs, as the model takes them, and targets."""
        federation, task = self._sim.federation, self._sim.task
        index = torch.from_numpy(federation.split(self._number(client))[split]).to(federation.x.device)
        x = federation.x[index]
        return (x if task.decode is None else task.decode(x)), federation.y[index]

    def _number(self, client: str) -> int:
        if client not in self.clients:
            raise CoterieError(f"there is no client '{client}'; there are {', '.join(self.clients)}")
        return self.clients.index(client)


class Watch:
    """Call the callbacks of a run, and tell when it is to stop."""

    def __init__(self, setup: Setup, given: Sequence[tuple[str, Any]]) -> None:
        self._setup, self._called = setup, list(given)
        self._view: RunView | None = None

    def start(
        self, path: Path | None, sim: Simulation, engine: ClientRunner, records: Sequence[Mapping[str, Any]]
    ) -> None:
        """Begin before the first round, or before the next one of a run that is resumed."""
        if not self._called:
            return
        self._view = RunView(self._setup, path, sim, engine)
        self._view.records = tuple(map(frozen, records))
        for _, callback in self._called:
            getattr(callback, "on_start", _nothing)(self._view)

    def after(self, records: Sequence[Mapping[str, Any]]) -> Stop | None:
        """Call the callbacks after a round, the last of `records`; return the stop that one of them asked for."""
        config = self._setup.config
        stop = early_stop(config, self._setup.metric, records)
        if self._view is None:
            return stop
        self._view.records = (*self._view.records, frozen(records[-1]))
        for name, callback in self._called:
            callback.on_round_end(self._view)
            why, self._view._why = self._view._why, None
            if why is not None and stop is None and self._view.round < config.rounds:
                stop = Stop(self._view.round, config.rounds, name, why)
                if config.privacy is not None:
                    warnings.warn(STOPPED_WITH_PRIVACY.format(name), CoterieWarning, stacklevel=2)
        return stop


def _nothing(run: RunView) -> None: ...


def frozen(value: Any) -> Any:
    """Return a record that cannot be changed."""
    if isinstance(value, Mapping):
        return types.MappingProxyType({key: frozen(each) for key, each in value.items()})
    return tuple(map(frozen, value)) if isinstance(value, list) else value
