"""What a recommendation tries: methods from cheap to dear, each tuned and scored in every fold."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from coterie.core.errors import CheckpointError, CoterieError
from coterie.core.method import Population
from coterie.core.units import parse_bytes
from coterie.core.user_code import naming_users_line
from coterie.data.federation import Federation
from coterie.evaluation import Predictions
from coterie.evaluation.benefit import sign_of
from coterie.evaluation.metrics import average
from coterie.experiment.divergence import DIVERGED
from coterie.experiment.pick_engine import Choices
from coterie.experiment.progress import Progress
from coterie.experiment.setup import Setup
from coterie.experiment.simulation import Simulation
from coterie.experiment.tuning.candidates import Engines
from coterie.experiment.tuning.search import MethodSearch
from coterie.methods.fields import AnyMethod
from coterie.storage import files
from coterie.storage.paged_rows import Store
from coterie.storage.run_folder import safe_name

# From cheap to dear: one model for all, then models of one's own, then several models for all.
PANEL = ("local", "fedavg", "fedavg-ft", "fedper", "fedmap", "ditto", "ifca")


@dataclasses.dataclass(frozen=True)
class Scored:
    """What a tuned method did on the examples that a fold held out."""

    predictions: Predictions | None  # None: they stay at the sites
    bytes_a_round: float  # of all clients together, up and down
    seconds_a_round: float


def suited(methods: Mapping[str, AnyMethod], setup: Setup) -> tuple[dict[str, AnyMethod], dict[str, str]]:
    """Leave out methods that do nothing of their own with this model or these clients.

    Returns:
        Those that are tried, and why the others are not.
    """
    size = len(setup.federation.names)
    people = Population(size, setup.config.participants(size), setup.task)
    why = {label: "; ".join(method.cautions(setup.task, people)) for label, method in methods.items()}
    if setup.peers is not None:
        why |= {label: "it needs a server" for label, method in methods.items() if not method.peer_to_peer}
    return {label: method for label, method in methods.items() if not why[label]}, {k: v for k, v in why.items() if v}


@naming_users_line()
def score_chosen(search: MethodSearch, federation: Federation, tell: Progress, choices: Choices) -> Scored:
    """Train what a search chose once more, and predict the held-out examples at the round that validation selects."""
    setup = dataclasses.replace(search.chosen_setup(search.setup), federation=federation)
    config = setup.config
    engines = search.engines or Engines(config.rounds, config.rounds, choices, tell.say)
    schedule = config.plan(), config.participants(len(federation.names)), config.seed
    store = Store(parse_bytes(config.memory) // 2, None)
    sim = Simulation.start(setup.method, setup.one_task(), federation, *schedule, place=setup.peers, store=store)
    sim.heard, sim.sampler = config.clients_heard, config.sampler
    engine = engines.engine(setup, sim)
    best, standing, at, sent, spent = sim.state, -math.inf, 0, 0, 0.0
    try:
        for number in range(1, config.rounds + 1):
            begin = time.perf_counter()
            outcome = sim.train(number, engine)
            spent += time.perf_counter() - begin
            sent += outcome.bytes_up + outcome.bytes_down
            if number % config.evaluate_every == 0 or number == config.rounds:
                scores = sim.evaluate(number, engine, own_only=True)["validation"]
                score = sign_of(setup.metric) * average(scores[setup.metric], config.average)
                if not at or score > standing:
                    best, standing, at = sim.state, score, number
    except CoterieError as error:
        if not str(error).startswith(DIVERGED) or not at:
            raise
    sim.state = best
    return Scored(sim.predictions(at, engine), sent / config.rounds, spent / config.rounds)


def write_scored(path: Path, found: Scored) -> None:
    """Keep what a method did in a fold."""
    if found.predictions is not None:
        files.write_tensors(path.with_suffix(".safetensors"), found.predictions._asdict())
    files.write_json(path.with_suffix(".json"), {"bytes": found.bytes_a_round, "seconds": found.seconds_a_round})


def read_scored(path: Path) -> Scored | None:
    """Read what `write_scored` wrote; None if it is not there."""
    if not path.with_suffix(".json").exists():
        return None
    about = files.read_json(path.with_suffix(".json"))
    outputs = path.with_suffix(".safetensors")
    flat = files.read_tensors(outputs) if outputs.exists() else None
    try:
        return Scored(None if flat is None else Predictions(**flat), float(about["bytes"]), float(about["seconds"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"'{path}.json' cannot be read: {error}") from error


def scored_path(folder: Path, label: str) -> Path:
    """Return where what a method did in a fold is kept, without the ends of the names."""
    return folder / "held-out" / safe_name(label)


def together(folds: Sequence[Predictions]) -> Predictions:
    """Join the held-out predictions of all folds, client after client."""
    outputs, y, owner = (torch.cat(list(parts)) for parts in zip(*folds, strict=True))
    order = torch.argsort(owner, stable=True)
    return Predictions(outputs[order], y[order], owner[order])


def prefixed(tell: Progress, prefix: str) -> Progress:
    """Pass on news under a label with a prefix."""
    return _Prefixed(tell, prefix)


@dataclasses.dataclass(frozen=True)
class _Prefixed:
    inner: Progress
    prefix: str

    def say(self, text: str) -> None:
        """Leave out remarks: there are many folds."""

    def start(self, label: str, done: int, rounds: int) -> None:
        self.inner.start(f"{self.prefix} {label}", done, rounds)

    def round(self, record: dict[str, Any], metric: str) -> None:
        self.inner.round(record, metric)

    def stop(self) -> None:
        self.inner.stop()
