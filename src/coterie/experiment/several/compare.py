"""Compare several methods on the same splits, over several seeds.

All methods of a seed share its data, initial model, participants and minibatches, and one task, so that methods with
the same training step share its compiled form. Local training can be one of the methods; no other reference is run.
If the others may stop early, it comes last, and trains for as many rounds as the longest of them with the same seed.
The seeds of a method run in lockstep (`lockstep.py`) if that is faster and memory allows, else one after another.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coterie.core.errors import CheckpointError
from coterie.core.task import Task
from coterie.core.toml import read_toml, to_toml
from coterie.engine.engine import one_thread
from coterie.engine.fork_jobs import do_all
from coterie.evaluation import Predictions
from coterie.evaluation.benefit import Trial, judge, measure_each
from coterie.evaluation.predictions import check_same_data
from coterie.experiment import stopping
from coterie.experiment.building import Model
from coterie.experiment.federations import Data
from coterie.experiment.notebook import Heard, listener
from coterie.experiment.pick_engine import Choices
from coterie.experiment.progress import Progress
from coterie.experiment.references import References, references
from coterie.experiment.run import run_setup, write_report
from coterie.experiment.setup import Setup
from coterie.experiment.several.comparison import Comparison
from coterie.experiment.several.lockstep import Run, group_by_engine, run_in_lockstep, seeds_at_once, share_pool
from coterie.experiment.several.trials import Methods, Trials, prepare_trials
from coterie.experiment.silos import check_files
from coterie.experiment.stopping import Stop
from coterie.experiment.take_home import adopt
from coterie.experiment.take_home.card import rewrite_cards
from coterie.experiment.take_home.held_out import tiny_clients
from coterie.storage import files
from coterie.storage.run_folder import COMPLETE, HELD_OUT, VALIDATION, RunFolder, model_file, safe_name

SETTINGS_NOT_COMPARED = (
    "engine",
    "compile",
    "workers",
    "debug",
    "memory",
    "checkpoint_every",
    "report",
    "sections",
    "track",
    *adopt.SETTINGS,
    "references",
)  # do not change what a run computes
OURS, KEPT = "ours", "kept"  # whose models a trial is of: the method's, or those that clients take home
FILES_OF_A_CHOICE = 5  # of a client


class Found(NamedTuple):
    """Hold what a run found: the rows of its clients, and their models' predictions for test and validation."""

    rows: list[dict[str, Any]]
    predictions: Predictions
    validation: Predictions | None  # None: nothing is chosen by it
    held_out: Predictions | None = None  # of clients with few validation examples
    stopped: Stop | None = None  # after which round it stopped; None: it had all planned rounds

    @property
    def outputs(self) -> adopt.Outputs:
        """Return the predictions by which a client chooses what it takes home."""
        assert self.validation is not None
        return adopt.Outputs(self.validation, self.predictions)


def compare(
    methods: Methods = ("local", "fedavg", "fedmap"),
    seeds: int | Sequence[int] = 3,
    data: Data | None = None,
    *,
    model: Model | None = None,
    head: str | None = None,
    out: str | Path | None = None,
    progress: Heard = None,
    **settings: Any,
) -> Comparison:
    """Run every method with every seed.

    Args:
        methods: names or instances, or a mapping that labels them (two FedMAPs with different `sigma2`, say).
        seeds: how many, counting from `seed`, or a list of them.
        data: as for `coterie.run`.
        model: as for `coterie.run`.
        head: the layer that is the model's head; by default its last linear layer.
        out: a folder in which every run gets a folder. Complete runs in it are not run again, others are resumed.
        progress: as for `coterie.run`.
        **settings: as for `coterie.run`. A hyper-parameter goes to those methods given by name that have it.

    Returns:
        Every method's test metric for every seed and client.

    Raises:
        ConfigError: settings are wrong; it lists every problem.
        CheckpointError: `out` holds runs with other settings.
        DataError: the data are missing or malformed, or `out` holds runs on other data.
        CoterieError: training diverged.

    Examples:
        >>> import coterie
        >>> found = coterie.compare(["local", "fedavg"], seeds=2, data="hospitals", model="linear", rounds=2)
        >>> found.methods, found.seeds
        (('local', 'fedavg'), (0, 1))
        >>> sorted(found.verdict()["fedavg"])
        ['gains', 'loses', 'undecided']
        >>> found.gains("fedavg").shape  # the mean over clients, for each seed
        (2,)
    """
    trials = prepare_trials(methods, seeds, data, model=model, head=head, **settings)
    return run_trials(trials, Path(out) if out is not None else None, progress=progress)


def run_trials(trials: Trials, out: Path | None, *, progress: Heard = None) -> Comparison:
    """Run what is not complete yet, and compare; see `compare` for `out`, `progress` and the errors."""
    tell = listener(progress)
    if out:
        _check_folders(trials, out)
    found: dict[tuple[str, int], Found] = {}
    measured: dict[str, list[Trial]] = {label: [] for label in trials.methods if label != "local"}
    kept: dict[str, list[Trial]] = {label: [] for label in measured}
    usual: list[References] = []  # one per seed
    number = seeds_at_once([trials.first.with_method(method) for method in trials.methods.values()], len(trials.seeds))
    choices = Choices(len(trials.seeds), len(trials.methods))
    for seeds in (trials.seeds[start : start + number] for start in range(0, len(trials.seeds), number)):
        bases = {seed: trials.first if seed == trials.seeds[0] else trials.prepare(seed) for seed in seeds}
        joined = share_pool(list(bases.values())) if len(bases) > 1 else None
        for label in _in_order(trials):
            folders = {seed: _folder(out, label, seed) if out else None for seed in seeds}
            setups = {
                seed: trials.setup(label, base) for seed, base in zip(seeds, joined or bases.values(), strict=True)
            }
            beside = label == "local" and len(trials.methods) > 1  # else it stops by itself
            ends = {seed: _end_of_local(found, seed) for seed in seeds} if beside else {}
            together = joined is not None
            for seed, each in _run_or_read(label, setups, folders, ends, tell, choices, together=together).items():
                found[label, seed] = each
        for seed, base in bases.items() if measured and "local" in trials.methods else ():
            for (label, whose), trial in _against_local(base, list(measured), seed, found, out).items():
                (kept if whose == KEPT else measured)[label].append(trial)
        if trials.references:
            usual += [references(base.federation, base.task) for base in bases.values()]
    rows = [
        {"method": label, "seed": seed, **row}
        for seed in trials.seeds
        for label in trials.methods
        for row in found[label, seed].rows
    ]
    metric, names = trials.first.metric, trials.first.federation.names
    benefits = {label: judge(metric, names, each, seed=trials.seeds[0]) for label, each in measured.items() if each}
    taken = {label: judge(metric, names, each, seed=trials.seeds[0]) for label, each in kept.items() if each}
    comparison = Comparison(metric, tuple(trials.methods), trials.seeds, rows, out, benefits, taken, usual)
    if out:
        files.write_json(out / "comparison.json", comparison.summary())
        if trials.first.config.report:
            write_report(out, [_folder(out, label, seed) for seed in trials.seeds for label in trials.methods], tell)
    return comparison


def _in_order(trials: Trials) -> list[str]:
    """Return the methods in the order in which they run: training alone last, if it is to end when the others have."""
    config = trials.first.config
    if config.early_stop is None and not config.callbacks:
        return list(trials.methods)
    return sorted(trials.methods, key=lambda label: label == "local")


def _end_of_local(found: Mapping[tuple[str, int], Found], seed: int) -> Stop | None:
    """Return when training alone ends: after as many rounds as the longest of the other runs of its seed."""
    stops = {label: each.stopped for (label, other), each in found.items() if other == seed}
    known = {label: stop for label, stop in stops.items() if stop is not None}
    if not known or len(known) < len(stops):
        return None  # one of them had all planned rounds
    longest = max(known, key=lambda label: known[label].round)
    return known[longest].of_reference(longest)


@dataclass(frozen=True)
class _Named:
    """Pass on news of a run under its label instead of its method's name."""

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
    label: str,
    setups: dict[int, Setup],
    folders: dict[int, Path | None],
    ends: Mapping[int, Stop | None],
    tell: Progress,
    choices: Choices,
    *,
    together: bool,
) -> dict[int, Found]:
    """Return what a method found with each seed: complete runs are read, the others run, in lockstep or in turn.

    A complete run that `ends` before it should, since the others were shorter in an earlier comparison, goes on.
    """
    found: dict[int, Found] = {}
    todo: list[Run] = []
    for seed, setup in setups.items():
        folder, name = folders[seed], f"{label} seed {seed}"
        begun = folder is not None and (folder / "config.toml").exists()
        cross_validated = bool(tiny_clients(setup))
        kept = [VALIDATION] * adopt.wanted(setup.config) + [HELD_OUT] * cross_validated
        needed = [*COMPLETE, *(f"{name}.safetensors" for name in kept)]
        complete = folder is not None and begun and all((folder / file).exists() for file in needed)
        if folder is None or not complete or (seed in ends and stopping.lengthen(folder, ends[seed])):
            todo.append(Run(name, setup, folder, begun, ends.get(seed)))
            continue
        tell.say(f"{name}: already complete")
        reader, choosing = RunFolder(folder), adopt.wanted(setup.config)
        validation = reader.read_predictions(VALIDATION) if choosing else None
        held_out = reader.read_held_out() if cross_validated else None
        stopped = stopping.read(folder)
        found[seed] = Found(reader.read_clients(), reader.read_predictions(), validation, held_out, stopped)
        _check_same_data(setup, folder, found[seed].rows, found[seed].predictions)
    for runs in group_by_engine(todo) if together else [[run] for run in todo]:
        if len(runs) == 1:
            name, setup, folder, begun, until = runs[0]
            alone: dict[str, Any] = {"progress": _Named(tell, name), "resuming": begun, "report": False, "until": until}
            results = [run_setup(setup, folder, **alone, choices=choices)]
        else:
            seeds = ", ".join(str(run.setup.config.seed) for run in runs)
            results = run_in_lockstep(f"{label} seeds {seeds}", runs, tell, choices)
        for run, result in zip(runs, results, strict=True):
            parts = result.clients, result.predictions, result.validation, result.held_out, result.stopped
            found[run.setup.config.seed] = Found(*parts)
    return found


def _against_local(
    base: Setup, labels: Sequence[str], seed: int, found: Mapping[tuple[str, int], Found], out: Path | None
) -> dict[tuple[str, str], Trial]:
    """Compare the models of one seed with those of local training.

    If clients choose what they take home, that is added to their rows and written.

    Returns:
        The trials of each method's models, (label, OURS), and of those that are kept, (label, KEPT).
    """
    names, alone = base.federation.names, found["local", seed]
    several = {(label, OURS): found[label, seed].predictions for label in labels}
    decided = dict[str, adopt.Decisions]()
    if adopt.wanted(base.config):
        for label in labels:
            ours = found[label, seed]
            held_out = adopt.both(ours.held_out, alone.held_out)
            decided[label] = adopt.decide(base.config, base.task, len(names), ours.outputs, alone.outputs, held_out)
            several[label, KEPT] = decided[label].kept.test
    trials = measure_each(base.task, base.metric, several, alone.predictions, names, seed=seed)
    jobs = list[Callable[[], None]]()
    for label, one in decided.items():
        after, before = (judge(base.metric, names, [trials[label, each]], seed=seed) for each in (KEPT, OURS))
        choice = adopt.measured(one, base.task, base.metric, names, after, before)
        for i, row in enumerate(found[label, seed].rows):
            row |= choice.row(i)
        if out:
            folder, beside = _folder(out, label, seed), _folder(out, "local", seed)
            jobs.append(partial(_write_choice, choice, base.task, folder, beside, seed))
    with files.together(FILES_OF_A_CHOICE * len(names) * len(jobs)):
        do_all(jobs)
    if out:
        for label in decided:
            RunFolder(_folder(out, label, seed)).write_clients(found[label, seed].rows)
    return trials


@one_thread()  # in a process beside others
def _write_choice(choice: adopt.Adoption, task: Task, folder: Path, beside: Path, seed: int) -> None:
    """Write what the clients of a run take home, some of it from the run of local training."""
    adopt.write(choice, folder, lambda i: files.read_tensors(model_file(beside, choice.names[i])))
    rewrite_cards(choice, task, folder, seed)


def _check_same_data(setup: Setup, folder: Path, rows: list[dict[str, Any]], found: Predictions) -> None:
    """Refuse a folder that was there before, if it is of other data under the same name."""
    own = [torch.from_numpy(setup.federation.split(i).test) for i in range(len(setup.federation.names))]
    owner = torch.arange(len(own)).repeat_interleave(torch.tensor([len(each) for each in own]))
    here = Predictions(found.outputs, setup.federation.y[torch.cat(own)], owner)
    there = [row["client"] for row in rows]
    check_same_data({f"'{folder}'": (there, found), "the data given now": (list(setup.federation.names), here)})


def _folder(out: Path, label: str, seed: int) -> Path:
    return out / f"{safe_name(label)}-seed{seed}"


def _check_folders(trials: Trials, out: Path) -> None:
    """Raise `CheckpointError` if `out` holds a run with other settings."""
    for seed in trials.seeds:
        for label in trials.methods:
            folder = _folder(out, label, seed)
            if not (folder / "config.toml").exists():
                continue
            check_files(folder)
            there = read_toml(folder / "config.toml")
            here = tomllib.loads(to_toml(trials.config(label, seed).to_file()))
            skipped = {*SETTINGS_NOT_COMPARED, *(["noise"] if "epsilon" in here else [])}  # epsilon finds each seed's
            different = [key for key in {**here, **there} if key not in skipped and here.get(key) != there.get(key)]
            if different:
                listed = ", ".join(f"{key} = {there.get(key)!r}, not {here.get(key)!r}" for key in different)
                raise CheckpointError(f"'{folder}' holds a run with other settings ({listed}): name another folder")
