"""Recommend a method for a federation: tune a panel inside each fold, compare on what was held out, and choose.

Nothing here looks at the run's test examples, so the run of what is recommended still has an honest test.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from coterie.core import rng
from coterie.core.errors import ConfigError
from coterie.data.distance import class_counts, input_distances, label_distances, label_distances_by_chance
from coterie.data.federation import Federation, SplitName
from coterie.evaluation.metrics import mean
from coterie.experiment.building import Model
from coterie.experiment.config import Config
from coterie.experiment.debugging import debugging
from coterie.experiment.federations import Data
from coterie.experiment.notebook import Heard, listener
from coterie.experiment.pick_engine import Choices
from coterie.experiment.privacy import refusals
from coterie.experiment.progress import Progress
from coterie.experiment.setup import Setup
from coterie.experiment.several.trials import Methods, Trials, prepare_trials
from coterie.experiment.tuning.candidates import Train, train_until
from coterie.experiment.tuning.choice import choose
from coterie.experiment.tuning.evidence import Evidence, evidence_of
from coterie.experiment.tuning.folds import folds_of
from coterie.experiment.tuning.halving import rounds_trained
from coterie.experiment.tuning.panel import (
    PANEL,
    Scored,
    prefixed,
    read_scored,
    score_chosen,
    scored_path,
    suited,
    together,
    write_scored,
)
from coterie.experiment.tuning.recommendation import Cost, Look, Recommendation, write
from coterie.experiment.tuning.search import MethodSearch
from coterie.experiment.tuning.tune import (
    Searches,
    given_names,
    run_searches,
    say_who_stops,
    searches_of,
    with_local,
)

TRIALS = 6
FOLDS = 3
KNOWN: tuple[SplitName, ...] = ("train", "validation")  # the parts that a recommendation looks at
# What does not belong into a file that other machines take unchanged.
OF_THIS_MACHINE = (
    *("engine", "compile", "workers", "debug", "memory", "device", "checkpoint_every", "data_dir", "reference"),
    *("callbacks", "sections"),
)


@dataclasses.dataclass(frozen=True)
class Panel:
    """All that is to be tried, checked before anything trains."""

    prepared: Trials
    folds: list[Federation]
    left_out: dict[str, str]
    trials: int
    fixed: list[str]
    own_data: bool  # it came from Python, so no file can name it

    @property
    def setup(self) -> Setup:
        return self.prepared.first

    def searches(self, federation: Federation, methods: Sequence[str] | None = None) -> Searches:
        """Return the searches of all methods, or of some, on a federation with the same clients."""
        chosen = {label: each for label, each in self.prepared.methods.items() if methods is None or label in methods}
        first = dataclasses.replace(self.setup, federation=federation)
        return searches_of(dataclasses.replace(self.prepared, methods=chosen, first=first), self.trials, {}, self.fixed)

    @property
    def rounds(self) -> tuple[int, int]:
        """The rounds of a method's search in one fold, and all rounds of everything."""
        rungs = next(iter(self.searches(self.setup.federation).methods.values())).rungs
        one = rounds_trained(rungs)
        return one, len(self.folds) * len(self.prepared.methods) * (one + self.setup.config.rounds) + one


def recommend(
    data: Data | None = None,
    methods: Methods = PANEL,
    *,
    trials: int = TRIALS,
    folds: int = FOLDS,
    model: Model | None = None,
    head: str | None = None,
    out: str | Path | None = None,
    progress: Heard = None,
    **settings: Any,
) -> Recommendation:
    """Recommend a method for a federation, with its settings.

    A panel of methods is tuned, with the same budget for each and for training alone, inside nested cross-validation at
    every site. The run's test examples are not looked at.

    Args:
        data: as for `coterie.run`.
        methods: the panel, from cheap to dear; `local` is added.
        trials: how many candidates each method has in the search of each fold.
        folds: how often another part of each site's examples is held out.
        model: as for `coterie.run`.
        head: the layer that is the model's head; by default its last linear layer.
        out: a folder for what was found and federation.toml. What is there already is not done again.
        progress: receives news.
        **settings: as for `coterie.compare`. Hyper-parameters that are given are not searched.

    Returns:
        Which method to use, how sure that is, who gains and who loses, and what it costs.

    Raises:
        ConfigError: settings are wrong; it lists every problem.
        DataError: the data are missing or malformed, or a client has too few examples.
        CheckpointError: `out` holds something else.

    Examples:
        >>> import coterie
        >>> advice = coterie.recommend("hospitals", ["local", "fedavg"], model="linear", trials=1, folds=2, rounds=2)
        >>> advice.method in ("local", "fedavg")
        True
        >>> result = coterie.run(**advice.settings)
    """
    panel = prepare_panel(data, methods, trials=trials, folds=folds, model=model, head=head, **settings)
    return run_panel(panel, Path(out) if out is not None else None, progress=progress)


def prepare_panel(
    data: Data | None = None,
    methods: Methods = PANEL,
    *,
    trials: int = TRIALS,
    folds: int = FOLDS,
    model: Model | None = None,
    head: str | None = None,
    fixed: Sequence[str] | None = None,
    **settings: Any,
) -> Panel:
    """Resolve and check everything before anything trains; see `recommend` for the arguments.

    `fixed` names the hyper-parameters that are not searched; by default those that are given.
    """
    if not isinstance(folds, int) or folds < 2:
        raise ConfigError([f"folds = {folds!r}: give a whole number from 2 on"])
    seed = settings.pop("seed", 0)
    prepared = prepare_trials(with_local(methods), [seed], data, model=model, head=head, **settings)
    refusals.of_search(prepared.first.config.privacy)
    tried, left_out = suited(prepared.methods, prepared.first)
    made = folds_of(prepared.first.federation, folds, prepared.first.config.data_seed)
    own = not isinstance(data, str | None)
    panel = Panel(
        dataclasses.replace(prepared, methods=tried),
        made,
        left_out,
        trials,
        given_names(settings) if fixed is None else list(fixed),
        own,
    )
    panel.searches(prepared.first.federation)  # complains of what is wrong
    return panel


class Place(Protocol):
    """Where a panel is tried. Folds count from 1; 0 is the federation with nothing held out."""

    def trainer(self, fold: int) -> Train:
        """Return what trains the candidates of a fold."""

    def score(
        self, searches: Sequence[MethodSearch], fold: int, tell: Progress, choices: Choices
    ) -> Iterator[tuple[str, Scored]]:
        """Train what each search chose once more, and predict what the fold holds out."""

    def evidence(self, scored: Mapping[str, Sequence[Scored]]) -> Evidence:
        """Return what all folds together say of each site."""

    def look(self) -> Look:
        """Describe the sites."""


@dataclasses.dataclass(frozen=True)
class Here:
    """Try the panel in this process, where all data are."""

    panel: Panel

    def trainer(self, fold: int) -> Train:
        return train_until

    def score(
        self, searches: Sequence[MethodSearch], fold: int, tell: Progress, choices: Choices
    ) -> Iterator[tuple[str, Scored]]:
        for search in searches:
            yield search.label, score_chosen(search, self.panel.folds[fold - 1], tell, choices)

    def evidence(self, scored: Mapping[str, Sequence[Scored]]) -> Evidence:
        setup = self.panel.setup
        held = {
            label: together([each.predictions for each in found if each.predictions is not None])
            for label, found in scored.items()
        }
        return evidence_of(setup.task, setup.metric, held, setup.federation.names, seed=setup.config.seed)

    def look(self) -> Look:
        return look_at(self.panel.setup.federation, self.panel.setup.config.seed)


def run_panel(
    panel: Panel, out: Path | None, *, progress: Heard = None, place: Place | None = None, report: bool = True
) -> Recommendation:
    """Try the panel, as far as `out` does not have it, and choose; see `recommend`. `report`: write its page, too."""
    tell, place = listener(progress), place or Here(panel)
    say_who_stops(panel.setup.config, tell)
    setup = panel.setup
    temporary = tempfile.TemporaryDirectory(prefix="coterie-recommend-") if out is None else nullcontext(str(out))
    with debugging(setup.config), temporary as scratch:
        folder = Path(scratch)
        scored: dict[str, list[Scored]] = {label: [] for label in panel.prepared.methods}
        choices = Choices(repeats=len(panel.folds), methods=len(scored))
        for k in range(1, len(panel.folds) + 1):
            news = prefixed(tell, f"fold {k}/{len(panel.folds)}")
            for label, each in _fold(panel, k, folder / f"fold-{k}", news, choices, place).items():
                scored[label].append(each)
        costs = _costs(scored, setup)
        sent = {label: costs[label].bytes_a_site for label in scored}
        choice = choose(setup.metric, place.evidence(scored), setup.federation.names, sent, setup.config.average)
        searches = panel.searches(setup.federation, [choice.chosen])
        run_searches(searches, folder / "final", prefixed(tell, "settings of"), train=place.trainer(0))
        settings = settings_of(searches.chosen(choice.chosen).config, own_data=panel.own_data)
        found = Recommendation(
            choice.chosen,
            settings,
            place.look(),
            choice,
            costs,
            panel.left_out,
            panel.rounds[0],
            len(panel.folds),
            setup.metric,
            None if out is None else out / "federation.toml",
        )
        if out is not None:
            write(found, out)
            if report and setup.config.report:
                from coterie.experiment.run import write_report

                write_report(out, [out], tell)
    return found


def _fold(panel: Panel, k: int, folder: Path, tell: Progress, choices: Choices, place: Place) -> dict[str, Scored]:
    """Return what every method did on the examples that one fold held out."""
    searches = panel.searches(panel.folds[k - 1])
    run_searches(searches, folder, tell, choices, place.trainer(k))
    paths = {label: scored_path(folder, label) for label in searches.methods}
    found = {label: known for label, path in paths.items() if (known := read_scored(path)) is not None}
    missing = [search for label, search in searches.methods.items() if label not in found]
    for label, made in place.score(missing, k, tell, choices):
        write_scored(paths[label], made)
        found[label] = made
    return {label: found[label] for label in searches.methods}


def look_at(federation: Federation, seed: int) -> Look:
    """Describe the sites by their training and validation examples."""
    sizes = [len(own.train) + len(own.validation) for own in federation.clients.values()]
    labels = None
    if federation.num_classes is not None:
        counts = class_counts(federation, KNOWN)
        by_chance = label_distances_by_chance(counts, rng.generator(seed, "look at labels"))
        labels = float(np.median(label_distances(counts).from_all)), float(np.median(by_chance))
    away, expected = input_distances(federation, KNOWN)
    inputs = float(np.median(away)), float(np.median(expected))
    return Look(len(sizes), min(sizes), int(np.median(sizes)), max(sizes), labels, inputs)


def settings_of(config: Config, *, own_data: bool) -> dict[str, Any]:
    """Return the settings of a run that can be taken to other machines."""
    values = {key: value for key, value in config.to_file().items() if value is not None}
    fields = Config.model_fields
    values = {key: value for key, value in values.items() if key not in OF_THIS_MACHINE}
    values = {key: value for key, value in values.items() if value != {}}  # a file does not have empty tables either
    if own_data or values.get("silos"):
        values.pop("data", None)
    return {
        key: value
        for key, value in values.items()
        if key in ("method", "data", "model", "rounds", "seed", "hyper", "optimizer") or value != fields[key].default
    }


def _costs(scored: Mapping[str, Sequence[Scored]], setup: Setup) -> dict[str, Cost]:
    rounds, size = setup.config.rounds, len(setup.federation.names)
    return {
        label: Cost(
            rounds * mean([each.bytes_a_round for each in found]) / size,
            rounds * mean([each.seconds_a_round for each in found]) / 60,
        )
        for label, found in scored.items()
    }
