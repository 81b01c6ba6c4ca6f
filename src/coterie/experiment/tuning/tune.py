"""Tune methods on a federation: search each with the same budget, choose on validation data, then test what was chosen.

Training alone (`local`) is always among the methods and gets the same budget, so that what is gained over it is not
gained by tuning. The search works on a federation without test examples (`candidates.without_test`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.core.errors import ConfigError
from coterie.core.toml import to_toml
from coterie.evaluation.benefit import sign_of
from coterie.experiment.building import Model
from coterie.experiment.config import TABLES, Config
from coterie.experiment.debugging import debugging
from coterie.experiment.federations import Data
from coterie.experiment.notebook import Heard, listener
from coterie.experiment.pick_engine import Choices
from coterie.experiment.privacy import refusals
from coterie.experiment.progress import Progress
from coterie.experiment.setup import Setup
from coterie.experiment.several.compare import run_trials
from coterie.experiment.several.comparison import Comparison
from coterie.experiment.several.trials import Methods, Trials, prepare_trials
from coterie.experiment.tuning.candidates import Train, without_test
from coterie.experiment.tuning.halving import rounds_trained, rungs_of
from coterie.experiment.tuning.journal import SearchFolder
from coterie.experiment.tuning.propose import MIN_FOR_IMPORTANCES, require_optuna
from coterie.experiment.tuning.search import MethodSearch, by_method, run_search
from coterie.experiment.tuning.space import MODEL, Range, check_names, parse_wanted, space_of
from coterie.experiment.tuning.tested import tested
from coterie.methods.fields import AnyMethod
from coterie.storage import files
from coterie.storage.run_folder import safe_name

LOCAL = "local"
TRIALS = 20
TUNING = "tuning"  # the folder of the search in that of a comparison
Wanted = Mapping[str, Range | None] | Sequence[str]
# Settings that change neither what a candidate scores nor which is chosen.
NOT_OF_A_SEARCH = (
    *("engine", "compile", "workers", "debug", "memory", "checkpoint_every", "report", "track", "device", "bf16"),
    *("early_stop", "callbacks", "sections"),  # of the runs that follow
)


@dataclasses.dataclass
class Searches:
    """All that is to be searched, checked before anything trains."""

    setup: Setup  # with all examples
    methods: dict[str, MethodSearch]

    @property
    def budget(self) -> int:
        """The rounds that each method's candidates train for together."""
        return rounds_trained(next(iter(self.methods.values())).rungs)

    @property
    def metric(self) -> str:
        return self.setup.metric

    @property
    def best(self) -> str:
        """The method whose chosen candidate scores best on validation data; training alone, if none is better."""
        sign = sign_of(self.metric)
        order = sorted(self.methods, key=lambda label: label != LOCAL)
        return max(order, key=lambda label: sign * self.methods[label].score)

    def about(self) -> dict[str, Any]:
        """Return what identifies this search, for its folder."""
        config = self.setup.config.to_file()
        settings = {
            key: value for key, value in config.items() if key not in ("method", *TABLES, *NOT_OF_A_SEARCH, "reference")
        }
        methods = {
            label: {
                "method": each.setup.config.method,
                "hyper": each.setup.config.hyper,
                "optimizer": each.setup.config.optimizer,
                "space": {name: str(found) for name, found in each.space.items()},
            }
            for label, each in self.methods.items()
        }
        first = next(iter(self.methods.values()))
        sizes = {name: [len(own.train), len(own.validation)] for name, own in self.setup.federation.clients.items()}
        return {
            "settings": settings,
            "metric": self.metric,
            "rungs": [list(rung) for rung in first.rungs],
            "methods": methods,
            "clients": sizes,
        }

    def chosen(self, label: str) -> Setup:
        """Return the setup, with all examples, of what was chosen for a method."""
        search = self.methods[label]
        return search.chosen_setup(self.setup.with_method(search.setup.method))


@dataclasses.dataclass
class Tuning:
    """The result of `coterie.tune`.

    Attributes:
        searches: what was tried for each method, and what was chosen.
        best: the method that validation data choose; "local" if none does better than training alone.
        comparison: the best method and training alone, both as chosen, on test examples, which were not looked at
            before; None without tests.
        path: the folder of the search, if there is one.
    """

    searches: Searches
    best: str
    comparison: Comparison | None
    path: Path | None

    @property
    def metric(self) -> str:
        """The metric that chose."""
        return self.searches.metric

    def values(self, method: str | None = None) -> dict[str, Any]:
        """Return the values that were chosen for a method, by default for the best."""
        return dict(self.searches.methods[method or self.best].chosen.values)

    def method(self, method: str | None = None) -> AnyMethod:
        """Return a method, by default the best, as it was chosen: for `coterie.run` or `coterie.compare`."""
        return self.searches.chosen(method or self.best).method

    def validation(self, method: str | None = None) -> float:
        """Return what was chosen for a method scores on validation data."""
        return self.searches.methods[method or self.best].score


def tune(
    methods: Methods = ("fedavg", "fedmap"),
    data: Data | None = None,
    *,
    trials: int = TRIALS,
    search: Wanted = (),
    halving: bool = True,
    model: Model | None = None,
    head: str | None = None,
    out: str | Path | None = None,
    progress: Heard = None,
    **settings: Any,
) -> Tuning:
    """Search the settings of methods, and of training alone, with the same budget; then test what was chosen.

    Args:
        methods: names or instances, or a mapping that labels them; `local` is added.
        data: as for `coterie.run`.
        trials: how many candidates each method has. The first is what is set already.
        search: what else to search, or in which range, such as `["lam=0.1..10", "model=mlp|linear", "prior"]`.
        halving: drop the worse two thirds of the candidates early, twice; otherwise all train for all rounds.
        model: as for `coterie.run`.
        head: the layer that is the model's head; by default its last linear layer.
        out: a folder for the search. What is there already is not done again.
        progress: receives news.
        **settings: as for `coterie.compare`. Hyper-parameters that are given are not searched.

    Returns:
        What was tried, what was chosen, and how it does on test examples.

    Raises:
        ConfigError: settings or ranges are wrong; it lists every problem.
        CheckpointError: `out` holds another search.
        DataError: the data are missing or malformed.
        CoterieError: Optuna is not installed, or no candidate of a method could be trained.

    Examples:
        >>> import coterie
        >>> found = coterie.tune(["fedavg"], "hospitals", model="linear", trials=2, rounds=2)
        >>> found.best in ("local", "fedavg")
        True
        >>> list(found.values("fedavg"))  # what was searched, with the values that were chosen
        ['lr']
    """
    found = prepare_searches(
        methods, data, trials=trials, search=search, halving=halving, model=model, head=head, **settings
    )
    return run_tuning(found, Path(out) if out is not None else None, progress=progress)


def prepare_searches(
    methods: Methods,
    data: Data | None = None,
    *,
    trials: int = TRIALS,
    search: Wanted = (),
    halving: bool = True,
    model: Model | None = None,
    head: str | None = None,
    **settings: Any,
) -> Searches:
    """Resolve and check everything before anything trains; see `tune` for the arguments.

    Raises:
        ConfigError: settings or ranges are wrong; it lists every problem.
    """
    problems: list[str] = []
    wanted: Mapping[str, Range | None] = {}
    try:
        wanted = search if isinstance(search, Mapping) else parse_wanted(search)
    except ConfigError as error:
        problems += error.problems
    seed = settings.pop("seed", 0)
    try:
        prepared = prepare_trials(with_local(methods), [seed], data, model=model, head=head, **settings)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    if MODEL in wanted and model is not None and not isinstance(model, str):
        raise ConfigError([f"--search {MODEL}: the model came from Python, so models are not searched by name"])
    return searches_of(prepared, trials, wanted, given_names(settings), halving=halving)


def searches_of(
    prepared: Trials, trials: int, wanted: Mapping[str, Range | None], fixed: Sequence[str], *, halving: bool = True
) -> Searches:
    """Return the searches of methods that are prepared already.

    Raises:
        ConfigError: there are no trials, or a range is wrong.
    """
    if not isinstance(trials, int) or trials < 1:
        raise ConfigError([f"trials = {trials!r}: give a whole number from 1 on"])
    refusals.of_search(prepared.first.config.privacy)
    prepared.first.one_task()  # complains of different models
    check_names(wanted, prepared.methods)
    if trials >= MIN_FOR_IMPORTANCES:  # fewer are spread evenly, and nothing is asked of their scores
        require_optuna()
    setup = prepared.first
    blind = dataclasses.replace(setup, federation=without_test(setup.federation))
    rungs = rungs_of(trials, setup.config.rounds, halving=halving)
    searches, problems = {}, []
    for label, method in prepared.methods.items():
        try:
            space = space_of(method, fixed, wanted)
        except ConfigError as error:
            problems += error.problems
        else:
            searches[label] = MethodSearch(label, blind.with_method(method), space, rungs)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return Searches(setup, searches)


def run_tuning(
    searches: Searches, out: Path | None, *, progress: Heard = None, test: bool = True, report: bool = True
) -> Tuning:
    """Do the searches, as far as `out` does not have them, and test what was chosen.

    Args:
        searches: what to search.
        out: the folder; None to keep nothing.
        progress: receives news.
        test: run what was chosen, and training alone, with all examples.
        report: write a page about the search.
    """
    tell = listener(progress)
    say_who_stops(searches.setup.config, tell)
    with _folder(out) as path:
        run_searches(searches, path, tell)
        best = searches.best
        comparison = tested(searches, path, list(dict.fromkeys([LOCAL, best])), tell) if test else None
        if comparison is not None:
            comparison = dataclasses.replace(comparison, path=out)
        if out is not None:
            summary = {"format": 1, "metric": searches.metric, "best": best, "rounds_of_each": searches.budget}
            summary["methods"] = {label: each.summary() for label, each in searches.methods.items()}
            files.write_json(path / "tuning.json", summary)
            for label in searches.methods:
                files.write_text(path / f"{safe_name(label)}.toml", to_toml(searches.chosen(label).config.to_file()))
            if report and searches.setup.config.report:
                write_page(path, tell)
    return Tuning(searches, best, comparison, out)


def say_who_stops(config: Config, tell: Progress) -> None:
    """Say that a search does not stop early, if its runs are to."""
    if config.early_stop is not None or config.callbacks:
        tell.say("A search trains all candidates as long; early_stop and callbacks are for the runs that follow it")


def run_searches(
    searches: Searches, path: Path, tell: Progress, choices: Choices | None = None, train: Train | None = None
) -> None:
    """Search all methods, one after another; what the journal in `path` has is not done again."""
    folder = SearchFolder(path)
    done = by_method(folder.begin(searches.about()))
    choices = choices or Choices(methods=len(searches.methods))
    with debugging(searches.setup.config):
        for label, search in searches.methods.items():
            if not search.candidates:
                run_search(search, folder, done.get(label, []), tell, choices, train)
    folder.finish()


def compare_tuned(
    methods: Methods = (LOCAL, "fedavg", "fedmap"),
    seeds: int | Sequence[int] = 3,
    data: Data | None = None,
    *,
    trials: int = TRIALS,
    out: str | Path | None = None,
    progress: Heard = None,
    **settings: Any,
) -> Comparison:
    """Tune each method, and training alone, with the same budget, then compare what was chosen over the seeds.

    The search looks at the validation examples of the first seed. All seeds have its splits, so that no test example
    was seen; they differ in the initial model, the minibatches and who takes part.

    Args:
        methods: as for `coterie.compare`; `local` is added.
        seeds: as for `coterie.compare`.
        data: as for `coterie.run`.
        trials: how many candidates each method has.
        out: a folder for the runs, with the search in its folder `tuning`.
        progress: receives news.
        **settings: as for `coterie.compare`. Hyper-parameters that are given are not searched.

    Examples:
        >>> import coterie
        >>> found = coterie.compare_tuned(["fedavg"], 2, "hospitals", model="linear", trials=2, rounds=2)
        >>> found.methods
        ('local', 'fedavg')
    """
    settings.setdefault("split_seed", first_seed(seeds, settings.get("seed")))
    prepared = prepare_trials(with_local(methods), seeds, data, **settings)
    path = Path(out) if out is not None else None
    searches = searches_of(prepared, trials, {}, given_names(settings))
    found = run_tuning(searches, path / TUNING if path else None, progress=progress, test=False)
    return run_trials(tuned(prepared, found), path, progress=progress)


def tuned(prepared: Trials, found: Tuning) -> Trials:
    """Return the runs of a comparison with the settings that were chosen."""
    return dataclasses.replace(prepared, methods={label: found.method(label) for label in prepared.methods})


def first_seed(seeds: int | Sequence[int], first: Any) -> Any:
    """Return the first seed of a comparison."""
    return (first or 0) if isinstance(seeds, int) or not seeds else seeds[0]


def with_local(methods: Methods) -> Methods:
    """Return the methods with training alone first, if it is not among them."""
    if isinstance(methods, Mapping):
        return methods if LOCAL in methods else {LOCAL: LOCAL, **methods}
    return methods if LOCAL in methods else [LOCAL, *methods]


def given_names(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the hyper-parameters that the user has set, which are not searched."""
    tables = [settings[table] for table in TABLES if isinstance(settings.get(table), Mapping)]
    return [*settings, *(name for table in tables for name in table)]


def write_page(path: Path, tell: Progress) -> None:
    """Write report.html about a search; a failure costs a warning only."""
    from coterie.experiment.run import write_report

    write_report(path, [path], tell)


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Return the folder of a search, or a temporary one."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="coterie-tune-") as scratch:
        yield Path(scratch)
