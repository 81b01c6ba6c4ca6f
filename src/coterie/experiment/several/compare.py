"""Several methods on the same splits, over several seeds.

All methods of a seed share its data, initial model, participants and minibatches, and one task, so that methods with
the same training step share its compiled form. Local training can be one of the methods; no other reference is run.
The seeds of a method run abreast (`abreast.py`) where that pays and memory allows, else one after another.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coterie.data.federation import Federation, split_again
from coterie.errors import CheckpointError, ConfigError
from coterie.evaluation import Predictions
from coterie.evaluation.benefit import Trial, judge, measure
from coterie.evaluation.predictions import check_same_data
from coterie.experiment import files
from coterie.experiment.abreast import Run, alike, at_once, join, run_abreast
from coterie.experiment.comparison import Comparison
from coterie.experiment.config import TABLES, Config, read_toml, resolve, to_toml
from coterie.experiment.folder import COMPLETE, RunFolder, safe_name
from coterie.experiment.run import Progress, Silent, run_setup, write_report
from coterie.experiment.setup import Data, Model, Setup, prepare, sort_settings
from coterie.experiment.silos import check_files
from coterie.hyper import AnyMethod, find_method, hyper_parameters, name_of, suggest
from coterie.local import OPTIMIZERS

Found = tuple[list[dict[str, Any]], Predictions]  # the rows of a run's clients, and what their models say
Methods = Sequence[str | AnyMethod] | Mapping[str, str | AnyMethod]
ANYHOW = (
    "engine",
    "compile",
    "workers",
    "memory",
    "checkpoint_every",
    "report",
    "track",
)  # do not change what a run computes


@dataclass(frozen=True)
class Trials:
    """All that is to be run, checked before anything trains."""

    methods: dict[str, AnyMethod]  # by label
    seeds: tuple[int, ...]
    first: Setup  # of the first seed
    prepare: Callable[[int], Setup]  # of any

    def config(self, label: str, seed: int) -> Config:
        return self.first.with_method(self.methods[label]).config.model_copy(update={"seed": seed})


def compare(
    methods: Methods = ("local", "fedavg", "fedmap"),
    seeds: int | Sequence[int] = 3,
    data: Data | None = None,
    *,
    model: Model | None = None,
    head: str | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Comparison:
    """Run every method with every seed; see `coterie.run` for `data`, `model` and `settings`.

    `methods` are names or instances, or a mapping that labels them (two FedMAPs of different `sigma2`, say). `seeds`
    is their number, counting from `seed`, or a list. A hyper-parameter goes to those methods, of those given by name,
    that have it. With `out`, every run gets a folder there; complete runs are not run again, others are gone on with.
    """
    trials = prepare_trials(methods, seeds, data, model=model, head=head, **settings)
    return run_trials(trials, Path(out) if out is not None else None, progress=progress)


def prepare_trials(
    methods: Methods,
    seeds: int | Sequence[int],
    data: Data | None = None,
    *,
    model: Model | None = None,
    head: str | None = None,
    **settings: Any,
) -> Trials:
    """Resolve and check everything; raises one `ConfigError` with all that is wrong."""
    if isinstance(settings.get("hyper"), Mapping):
        settings = {**settings.pop("hyper"), **settings}
    settings = {**{key: value for key, value in settings.items() if value is not None}, "reference": False}
    problems: list[str] = []
    chosen = _labelled(methods, problems)
    numbers = _numbers(seeds, settings.pop("seed", 0), problems)
    own = {label: _own_names(method) for label, method in chosen.items()}
    shared = _shared(settings, own, any(isinstance(method, str) for method in chosen.values()), problems)
    built: dict[str, AnyMethod] = {}
    for label, method in chosen.items():
        mine = {key: value for key, value in settings.items() if key in shared or key in own[label]}
        try:
            built[label] = _build(method, data, model, mine)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    common = {key: value for key, value in settings.items() if key in set(Config.model_fields) - set(TABLES)}

    def setup(seed: int, given: Data | None = data) -> Setup:
        return prepare(next(iter(built.values())), given, model=model, head=head, seed=seed, **common)

    def another(seed: int) -> Setup:
        config, federation = first.config, first.federation
        plain = config.device == "cpu" and first.held_out is None and federation.weights is None
        if isinstance(data, str | Federation | None) or not plain:
            return setup(seed)
        return setup(seed, split_again(federation, validation=config.validation, test=config.test, seed=seed))

    first = setup(numbers[0])
    return Trials(built, numbers, first, another)


def run_trials(trials: Trials, out: Path | None, *, progress: Progress | None = None) -> Comparison:
    """Run what is not complete yet."""
    tell = progress or Silent()
    if out:
        _check_folders(trials, out)
    found: dict[tuple[str, int], Found] = {}
    measured: dict[str, list[Trial]] = {label: [] for label in trials.methods if label != "local"}
    number = at_once([trials.first.with_method(method) for method in trials.methods.values()], len(trials.seeds))
    for seeds in (trials.seeds[start : start + number] for start in range(0, len(trials.seeds), number)):
        bases = {seed: trials.first if seed == trials.seeds[0] else trials.prepare(seed) for seed in seeds}
        joined = join(list(bases.values())) if len(bases) > 1 else None
        for label, method in trials.methods.items():
            folders = {seed: _folder(out, label, seed) if out else None for seed in seeds}
            setups = {
                seed: base.with_method(method) for seed, base in zip(seeds, joined or bases.values(), strict=True)
            }
            for seed, each in _run_or_read(label, setups, folders, tell, together=joined is not None).items():
                found[label, seed] = each
        for seed, base in bases.items() if "local" in trials.methods else ():
            for label in measured:
                names, pair = base.federation.names, (found[label, seed][1], found["local", seed][1])
                measured[label].append(measure(base.task, base.metric, *pair, names, seed=seed))
    rows = [
        {"method": label, "seed": seed, **row}
        for seed in trials.seeds
        for label in trials.methods
        for row in found[label, seed][0]
    ]
    metric, names = trials.first.metric, trials.first.federation.names
    benefits = {label: judge(metric, names, each, seed=trials.seeds[0]) for label, each in measured.items() if each}
    comparison = Comparison(metric, tuple(trials.methods), trials.seeds, rows, out, benefits)
    if out:
        files.write_json(out / "comparison.json", comparison.summary())
        if trials.first.config.report:
            write_report(out, [_folder(out, label, seed) for seed in trials.seeds for label in trials.methods], tell)
    return comparison


@dataclass(frozen=True)
class _Named:
    """A progress that is told the label of a run instead of its method's name."""

    inner: Progress
    name: str

    def say(self, text: str) -> None:
        self.inner.say(text)

    def start(self, label: str, done: int, rounds: int) -> None:
        self.inner.start(self.name, done, rounds)

    def round(self, record: dict[str, Any], metric: str) -> None:
        self.inner.round(record, metric)

    def stop(self) -> None:
        self.inner.stop()


def _run_or_read(
    label: str, setups: dict[int, Setup], folders: dict[int, Path | None], tell: Progress, *, together: bool
) -> dict[int, Found]:
    """What a method found with each seed: read where it is complete; the others run abreast, or one after another."""
    found: dict[int, Found] = {}
    todo: list[Run] = []
    for seed, setup in setups.items():
        folder, name = folders[seed], f"{label} seed {seed}"
        begun = folder is not None and (folder / "config.toml").exists()
        if folder is None or not (begun and all((folder / file).exists() for file in COMPLETE)):
            todo.append(Run(name, setup, folder, begun))
            continue
        tell.say(f"{name}: complete already")
        rows, predictions = RunFolder(folder).read_clients(), RunFolder(folder).read_predictions()
        _check_same_data(setup, folder, rows, predictions)
        found[seed] = rows, predictions
    for runs in alike(todo) if together else [[run] for run in todo]:
        if len(runs) == 1:
            name, setup, folder, begun = runs[0]
            results = [run_setup(setup, folder, progress=_Named(tell, name), resuming=begun, report=False)]
        else:
            seeds = ", ".join(str(run.setup.config.seed) for run in runs)
            results = run_abreast(f"{label} seeds {seeds}", runs, tell)
        for run, result in zip(runs, results, strict=True):
            found[run.setup.config.seed] = result.clients, result.predictions
    return found


def _check_same_data(setup: Setup, folder: Path, rows: list[dict[str, Any]], found: Predictions) -> None:
    """A folder that was there already may be of other data under the same name."""
    own = [torch.from_numpy(setup.federation.split(i).test) for i in range(len(setup.federation.names))]
    owner = torch.arange(len(own)).repeat_interleave(torch.tensor([len(each) for each in own]))
    here = Predictions(found.outputs, setup.federation.y[torch.cat(own)], owner)
    there = [row["client"] for row in rows]
    check_same_data({f"'{folder}'": (there, found), "the data given now": (list(setup.federation.names), here)})


def _folder(out: Path, label: str, seed: int) -> Path:
    return out / f"{safe_name(label)}-seed{seed}"


def _check_folders(trials: Trials, out: Path) -> None:
    """What `out` holds already must be of the same settings."""
    for seed in trials.seeds:
        for label in trials.methods:
            folder = _folder(out, label, seed)
            if not (folder / "config.toml").exists():
                continue
            check_files(folder)
            there = read_toml(folder / "config.toml")
            here = tomllib.loads(to_toml(trials.config(label, seed).to_file()))
            different = [key for key in {**here, **there} if key not in ANYHOW and here.get(key) != there.get(key)]
            if different:
                told = ", ".join(f"{key} = {there.get(key)!r}, not {here.get(key)!r}" for key in different)
                raise CheckpointError(f"'{folder}' holds a run with other settings ({told}): name another folder")


def _labelled(methods: Methods, problems: list[str]) -> dict[str, str | AnyMethod]:
    if isinstance(methods, Mapping):
        labelled = dict(methods)
    else:
        names = [method if isinstance(method, str) else name_of(method) for method in methods]
        labelled = dict(zip(names, methods, strict=True))
        if twice := sorted({name for name in names if names.count(name) > 1}):
            problems.append(
                f"methods: {', '.join(twice)} more than once; give each a name of its own, {{'name': method}}"
            )
    if not labelled:
        problems.append("methods: name at least one; 'coterie methods' lists them")
    return labelled


def _numbers(seeds: int | Sequence[int], first: Any, problems: list[str]) -> tuple[int, ...]:
    try:
        numbers = tuple(range(int(first), int(first) + seeds)) if isinstance(seeds, int) else tuple(map(int, seeds))
    except (TypeError, ValueError):
        problems.append(f"seed = {first!r} and seeds = {seeds!r}: give whole numbers")
        return (0,)
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        problems.append(f"seeds = {seeds!r}: give at least one; none negative, none twice")
        return (0,)
    return numbers


def _own_names(method: str | AnyMethod) -> set[str]:
    """The hyper-parameters that settings may give this method; none for an instance, which has its own already."""
    try:
        cls = find_method(method)[0] if isinstance(method, str) else None
    except ConfigError:  # told by `resolve`
        cls = None
    return {hyper.name for hyper in hyper_parameters(cls)} if cls else set()


def _shared(settings: Mapping[str, Any], own: Mapping[str, set[str]], named: bool, problems: list[str]) -> set[str]:
    """The settings that go to all methods (`named`: the optimiser's too); complains of those that go to none."""
    shared = set(Config.model_fields) - {"method", *TABLES}
    if named:
        shared |= {"optimizer", *(hyper.name for cls in OPTIMIZERS.values() for hyper in hyper_parameters(cls))}
    theirs = {name for names in own.values() for name in names}
    for key in settings:
        if key not in shared | theirs:
            problems.append(f"{', '.join(own)}: none has a setting '{key}'{suggest(key, [*theirs, *shared])}")
    return shared


def _build(method: str | AnyMethod, data: Data | None, model: Model | None, settings: Mapping[str, Any]) -> AnyMethod:
    if not isinstance(method, str):
        return method
    own_model = model is not None and not isinstance(model, str)
    values = sort_settings(method, settings)
    values |= {"method": method, "data": data if isinstance(data, str | None) else "own-data"}
    values |= {"model": model if isinstance(model, str) else None}
    return resolve(values, own_data=not isinstance(data, str | None), own_model=own_model)[1]
