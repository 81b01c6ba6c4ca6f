"""Running: rounds, evaluation, selection on validation, checkpoints, and going on after a stop."""

from __future__ import annotations

import math
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from coterie import paged
from coterie.data import Federation
from coterie.data.loading import is_known
from coterie.errors import CheckpointError, ConfigError, CoterieWarning
from coterie.evaluation.benefit import sign_of
from coterie.evaluation.metrics import METRICS, mean, plain
from coterie.experiment import files, picture, tracking
from coterie.experiment.card import class_names
from coterie.experiment.config import parse_bytes, read_toml, to_toml
from coterie.experiment.finish import finish, summary
from coterie.experiment.folder import RunFolder
from coterie.experiment.journal import Journal
from coterie.experiment.pick import Begin, pick_engine
from coterie.experiment.result import Result
from coterie.experiment.setup import Data, Model, Setup, num_outputs, prepare
from coterie.experiment.silos import check_files, record_files
from coterie.experiment.simulation import Simulation, State
from coterie.hyper import AnyMethod
from coterie.spans import Profile, each, recording, span, timed

if TYPE_CHECKING:
    from coterie.experiment.abreast import Seat
from coterie.paged import Store


class Progress(Protocol):
    """Is told what happens; see `coterie.cli.progress`."""

    def say(self, text: str) -> None: ...
    def start(self, label: str, done: int, rounds: int) -> None: ...
    def round(self, record: dict[str, Any], metric: str) -> None: ...
    def stop(self) -> None: ...


class Silent:
    def say(self, text: str) -> None: ...
    def start(self, label: str, done: int, rounds: int) -> None: ...
    def round(self, record: dict[str, Any], metric: str) -> None: ...
    def stop(self) -> None: ...


def run(
    method: str | AnyMethod | None = None,
    data: Data | None = None,
    *,
    model: Model | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    profile: bool = False,
    **settings: Any,
) -> Result:
    """Train a federation and, for comparison, every client alone with the same number of gradient steps.

    `settings` are the keys of `Config` (`rounds`, `seed`, ...), the method's hyper-parameters (`sigma2`, `mu`, ...) and
    the optimiser's (`optimizer="adam"`, `lr`, ...). `data` is the name of a data set, a `Federation`, or one (x, y)
    pair of tensors or one `torch.utils.data.Dataset` a client; `model` a name, an `nn.Module`, or a factory. With
    `out`, a run folder is written there. `setting="pfedvmp/fmnist-50c-dir0.3"` names a published experiment, which has
    all of these; what else is given counts instead of its own. Without one, the method is FedMAP and the data FedMAP's
    label skew. With `profile`, the result's `profile` says where the time went, and `out` has a trace.json of it.
    """
    folder = Path(out) if out is not None else None
    with recording(profile) as recorded:
        setup = prepare(method, data, model=model, **settings)
        result = run_setup(setup, folder, progress=progress)
    return with_profile(result, recorded)


def with_profile(result: Result, recorded: Profile | None) -> Result:
    """The result with what was recorded, which is written too where there is a folder."""
    result.profile = recorded
    if recorded and result.path:
        RunFolder(result.path).write_trace(recorded)
    return result


def run_setup(
    setup: Setup,
    out: Path | None,
    *,
    progress: Progress | None = None,
    resuming: bool = False,
    report: bool = True,
    seat: Seat | None = None,
) -> Result:
    """Run (or, where `out` holds its checkpoints, go on with) a setup, and then its local reference.

    With `report`, and unless the configuration says no, report.html is written last. With a `seat`, it runs abreast
    of others.
    """
    from coterie.experiment.onboard import onboard_held_out  # which runs newcomers by `execute`

    tell = progress or Silent()
    tracking.check(setup.config.track, out)
    with span("run", run=setup.config.method):
        result = execute(setup, out, tell, resume=resuming, seat=seat)
    if setup.config.reference and setup.config.method != "local":
        alone = setup.with_method(local_like(setup.method))
        beside = out / "reference" if out else None
        begun = resuming and beside is not None and (beside / "config.toml").exists()
        with span("run", run="local"):
            result.reference = execute(alone, beside, tell, resume=begun)
    if out:
        picture.write_facts(result, setup.federation, out)
    finish(result, setup, out, do=seat.do if seat else None)
    if setup.held_out:
        result.onboarded = onboard_held_out(result, setup, out, tell)
    if out and report and setup.config.report:
        write_report(out, [out], tell)
    return result


@timed("report")
def write_report(out: Path, runs: list[Path], tell: Progress) -> None:
    """report.html in `out`. A picture that fails costs no result: it is told of, and can be drawn again."""
    from coterie.report import write  # it reads folders only, so what follows a run can be repeated at any time

    begin = time.perf_counter()
    try:
        path = write(runs, out / "report.html")
    except Exception as error:
        warnings.warn(f"the report was not written: {error}", CoterieWarning, stacklevel=2)
    else:
        tell.say(f"report: {path} ({time.perf_counter() - begin:.1f} s)")


def resume(
    path: str | Path,
    *,
    data: Data | None = None,
    model: Model | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> Result:
    """Go on with a run from its last intact checkpoint; a finished run is read back.

    A run whose data or model was given in Python needs the same ones again. With `device`, it goes on there: a
    checkpoint can be read everywhere.
    """
    path = Path(path)
    if (path / "deployment.json").exists():
        raise CheckpointError(f"'{path}' is a run on other machines: 'coterie flower resume {path}' goes on with it")
    values = read_config(path)
    check_files(path)
    named = {"data": is_known(values["data"]) or "silos" in values, "model": values["model"] != "own-model"}
    for key, value in {"data": data, "model": model}.items():
        if value is None and not named[key]:
            raise ConfigError([f"this run's {key} came from Python: go on with coterie.resume('{path}', {key}=...)"])
        if value is not None:
            values[key] = value
    if device is not None:
        values["device"] = device
        values.pop("workers", None)
    setup = prepare(**values)
    return run_setup(setup, path, progress=progress, resuming=True)


def execute(setup: Setup, out: Path | None, tell: Progress, *, resume: bool, seat: Seat | None = None) -> Result:
    config, federation = setup.config, setup.federation
    participants = config.participants(len(federation.names))
    store = Store(parse_bytes(config.memory) // 2, out / "checkpoints" if out else None)
    sim = Simulation.start(
        setup.method, setup.task, federation, config.plan(), participants, config.seed, place=setup.peers, store=store
    )
    sim.heard = config.clients_heard
    folder = RunFolder(out) if out else None
    records: list[dict[str, Any]] = []
    done, best, kept = 0, None, None  # rounds done, best round, and the state after it
    if folder and resume:
        done, sim.state, best = folder.load_last(sim.state)
        records = [_with_all_metrics(record, setup) for record in folder.read_rounds(done)]
        folder.rewrite_rounds(records)
        best, kept = _best_on_disk(folder, sim.state, done, best)
    elif folder:
        folder.create(to_toml(config.to_file()))
        record_files(folder.path, federation.files)
    begun = Begin(setup, sim, folder, config.rounds - done)
    engine = seat.engine(begun) if seat else pick_engine([begun], begun.probe, tell.say)
    tracked = tracking.Tracking(config.track, out, config.to_file(), federation.names, done)
    tell.start(config.method, done, config.rounds)
    standing = math.nan if best is None else _score(setup.metric, _at(records, best))
    journal = Journal(folder, config.checkpoint_every, done, best)
    try:
        for number in each("round", range(done + 1, config.rounds + 1)):
            begin = time.perf_counter()
            outcome = sim.train(number, engine)
            scores: dict[str, Any] = {}
            if number % config.evaluate_every == 0 or number == config.rounds:
                with span("evaluate"):
                    found = sim.evaluate(number, engine)
                    scores = {part: {m: plain(v) for m, v in by.items()} for part, by in found.items()}
                    score = _score(setup.metric, scores)
                    if best is None or _better(score, standing):
                        best, kept, standing = number, sim.state, score
            record = _record(number, outcome, federation) | scores
            record["seconds"] = (time.perf_counter() - begin) / (seat.number if seat else 1)
            records.append(record)
            journal.add(record, sim.state, best, kept, last=number == config.rounds)
            tracked.round(record)
            tell.round(record, setup.metric)
    except (KeyboardInterrupt, Exception):
        journal.write()  # all complete rounds are kept, whatever checkpoint_every says
        raise
    finally:
        tell.stop()
        tracked.close()
    if best is None or kept is None:  # a finished run whose best checkpoint was lost: the last round stands in
        best, kept = records[-1]["round"], sim.state
    last, both = records[-1]["round"], sim.both_tests(records[-1]["round"], engine)
    sim.state = kept
    views = sim.views(best, engine)
    predictions = sim.predictions(best, engine)
    if both:
        selected = both if best == last else sim.both_tests(best, engine)
        both = {"selected": {"round": best, **selected}, "last": {"round": last, **both}}
    result = Result(
        config,
        out,
        _client_rows(setup, records, best),
        records,
        best,
        setup.metric,
        None,
        setup.task,
        setup.method,
        views,
        predictions,
        both,
        kept.server,
    )
    if folder:
        folder.write_predictions(predictions)
        models = partial(write_models, folder, result, federation, len(federation.names))
        with files.together(2 * len(federation.names)):
            seat.do([models]) if seat else models()
        folder.write_clients(result.clients)
        files.write_json(folder.path / "summary.json", summary(result))
    return result


def _record(number: int, outcome: Any, federation: Federation) -> dict[str, Any]:
    return {
        "round": number,
        "participants": [federation.names[i] for i in outcome.participants],
        "info": {name: value.tolist() for name, value in outcome.info.items()},
        "server": {name: value.tolist() for name, value in outcome.server_info.items()},
        "bytes_up": outcome.bytes_up,
        "bytes_down": outcome.bytes_down,
    }


def _with_all_metrics(record: dict[str, Any], setup: Setup) -> dict[str, Any]:
    """A run that began with an earlier version has not measured them all."""
    unknown = dict.fromkeys(METRICS[setup.task.kind], [math.nan] * len(setup.federation.names))
    parts = ("validation", "test", "global_validation", "global_test")
    return record | {part: unknown | record[part] for part in parts if part in record}


def _client_rows(setup: Setup, records: list[dict[str, Any]], best: int) -> list[dict[str, Any]]:
    chosen = _at(records, best)
    rows = []
    for i, (name, split) in enumerate(setup.federation.clients.items()):
        row: dict[str, Any] = {"client": name, "train": len(split.train), "validation": len(split.validation)}
        row |= {"test": len(split.test), "round": best}
        for part in ("validation", "test"):
            row |= {f"{part}_{metric}": chosen[part][metric][i] for metric in METRICS[setup.task.kind]}
        row |= {f"last_test_{metric}": records[-1]["test"][metric][i] for metric in METRICS[setup.task.kind]}
        rows.append(row)
    return rows


@timed("write")
def write_models(folder: RunFolder, result: Result, federation: Federation, population: int) -> None:
    config = result.config
    for i, row in enumerate(result.clients):
        about = {
            "method": config.method,
            "hyper": config.hyper,
            "model": config.model,
            "head": config.head,
            "kind": result.task.kind,
            "num_classes": federation.num_classes,
            "outputs": num_outputs(federation),
            "input_shape": list(federation.x.shape[1:]),
            "classes": class_names(federation),
            "decode": None if federation.decode is None else federation.decode.to_json(),
            "population": [population, config.participants(population)],
            "data": config.data,
            "round": result.selected,
            "metrics": {key: value for key, value in row.items() if key.startswith(("validation_", "test_"))},
            "rebuild": (
                "model.safetensors holds the view. Where its names are the model's own, load it with "
                "load_state_dict into the model built for input_shape with so many outputs; in general, "
                "the method's predict(task, view, x) gives the outputs. coterie.load(run, client) does both. "
                "Where decode is not null, the model was trained on images x of bytes as the float32 numbers "
                "(x / 255 - mean) / std, channel by channel, and expects these."
            ),
        }
        folder.write_model(row["client"], paged.take(result.views, i), about)
        if row["client"] in federation.preprocessing:
            folder.write_preprocessing(row["client"], dict(federation.preprocessing[row["client"]]))


def _best_on_disk(folder: RunFolder, like: State, done: int, best: int | None) -> tuple[int | None, State | None]:
    if best is None or best == done:
        return best, like if best is not None else None
    try:
        return best, folder.load(best, like)[0]
    except CheckpointError:
        return None, None  # the best one is damaged: select again among what follows


def _at(records: list[dict[str, Any]], number: int) -> dict[str, Any]:
    return next(record for record in records if record["round"] == number)


def _better(new: float, old: float) -> bool:
    """Strictly better, so that ties go to the earlier round."""
    return new > old or (math.isnan(old) and not math.isnan(new))


def _score(metric: str, record: dict[str, Any]) -> float:
    """What rounds are selected by: the higher, the better."""
    return sign_of(metric) * mean(record["validation"][metric])


def local_like(method: AnyMethod) -> AnyMethod:
    from coterie.methods import Local

    optimizer = getattr(method, "optimizer", None)
    return Local(optimizer) if optimizer is not None else Local()


def read_config(path: Path) -> dict[str, Any]:
    if not (path / "config.toml").exists():
        raise CheckpointError(f"'{path}' is not a run folder: it has no config.toml")
    return read_toml(path / "config.toml")
