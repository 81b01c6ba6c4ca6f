"""Train for all rounds of a setup, and evaluate the selected one."""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.core import client_rows
from coterie.core.errors import CheckpointError
from coterie.core.toml import to_toml
from coterie.core.units import parse_bytes
from coterie.core.user_code import naming_users_line
from coterie.data import Federation
from coterie.evaluation import Predictions
from coterie.evaluation.metrics import with_one_nan
from coterie.experiment import stopping, tracking
from coterie.experiment.building import input_dtype, num_outputs
from coterie.experiment.callbacks import Watch
from coterie.experiment.find_callbacks import make as make_callbacks
from coterie.experiment.global_tests import both_tests
from coterie.experiment.mixed_simulation import begin as begin_simulation
from coterie.experiment.pick_engine import Choices, RunStart, pick_engine
from coterie.experiment.progress import Progress
from coterie.experiment.records import better, record_of, round_record, score_of, table_rows, with_all_metrics
from coterie.experiment.result import Result
from coterie.experiment.setup import Setup
from coterie.experiment.silos import record_files
from coterie.experiment.stopping import Stop
from coterie.experiment.take_home import adopt
from coterie.experiment.take_home.card import class_names
from coterie.experiment.take_home.held_out import TINY, predict_held_out, tiny_clients
from coterie.methods.fields import AnyMethod
from coterie.profiling import each, span, timed
from coterie.storage import files
from coterie.storage.journal import Journal
from coterie.storage.run_folder import VALIDATION, RunFolder
from coterie.storage.state import State

if TYPE_CHECKING:
    from coterie.engine import ClientRunner
    from coterie.experiment.several.turns import RunThread
from coterie.storage.paged_rows import Store


@naming_users_line()
def execute(
    setup: Setup,
    out: Path | None,
    tell: Progress,
    *,
    resume: bool,
    thread: RunThread | None = None,
    choices: Choices | None = None,
    until: Stop | None = None,
    chosen_from: bool = True,
) -> Result:
    """Train for all rounds, or until the run is to stop, and evaluate the selected round.

    The run folder then lacks only its tables, clients.csv and summary.json, which mark it as finished; the caller
    writes them (`conclude.write_tables`).

    Args:
        setup: what to run.
        out: the run folder, or None to write nothing.
        tell: receives news of the run.
        resume: `out` already holds this run; continue from its last checkpoint.
        thread: the thread of this run, if it runs in lockstep with others.
        choices: engines already chosen for similar runs; the one chosen here is added.
        until: stop as another run did; by default, early stopping and callbacks decide.
        chosen_from: clients choose between these models and others, if they may choose.

    Returns:
        The result, without a local reference.

    Raises:
        CheckpointError: `out` already holds a run and `resume` is false, or all its checkpoints are damaged.
        CoterieError: training diverged. As after Ctrl-C, all complete rounds are on disk then.
    """
    config, federation = setup.config, setup.federation
    sim = begin_simulation(setup, Store(parse_bytes(config.memory) // 2, out / "checkpoints" if out else None))
    sim.heard, sim.shares, sim.sampler = config.clients_heard, setup.shares, config.sampler
    watch = Watch(setup, make_callbacks(setup.callbacks))
    folder = RunFolder(out) if out else None
    records: list[dict[str, Any]] = []
    done, best, kept = 0, None, None  # rounds done, best round, and the state after it
    if folder and resume:
        done, sim.state, best = folder.load_last(sim.state)
        records = [with_all_metrics(record, setup) for record in folder.read_rounds(done)]
        folder.rewrite_rounds(records)
        best, kept = _best_on_disk(folder, sim.state, done, best)
    elif folder:
        folder.create(to_toml(config.to_file()))
        record_files(folder.path, federation.files)
    stopped = until or (stopping.read(out) if resume else None)
    if out and until:
        stopping.write(out, until)
    rounds = stopped.round if stopped else config.rounds
    start = RunStart(setup, sim, folder, rounds - done)
    engine: ClientRunner = thread.engine(start) if thread else pick_engine([start], start.probe, tell.say, choices)
    tracked = tracking.Tracking(config.track, out, config.to_file(), federation.names, done)
    tell.start(config.method, done, rounds)
    standing = math.nan if best is None else score_of(setup.metric, config.average, record_of(records, best))
    journal = Journal(folder, config.checkpoint_every, done, best)

    def evaluate(record: dict[str, Any]) -> None:
        nonlocal best, kept, standing
        with span("evaluate"):
            found = sim.evaluate(record["round"], engine)
            record |= {part: {m: with_one_nan(v) for m, v in by.items()} for part, by in found.items()}
            score = score_of(setup.metric, config.average, record)
            if best is None or config.takes_last or better(score, standing):
                best, kept, standing = record["round"], sim.state, score

    try:
        watch.start(out, sim, engine, records)
        for number in each("round", range(done + 1, rounds + 1)):
            begin = time.perf_counter()
            record = round_record(number, sim.train(number, engine), federation)
            if number % config.evaluate_every == 0 or number == rounds:
                evaluate(record)
            record["seconds"] = (time.perf_counter() - begin) / (thread.number if thread else 1)
            records.append(record)
            try:
                if (asked := watch.after(records)) is not None and stopped is None:
                    stopped = asked
                    if "test" not in record:
                        evaluate(record)
                    if out:  # before the last checkpoint: what is resumed ends with the same round
                        stopping.write(out, stopped)
                    tell.say(f"{config.method} seed {config.seed}: {stopped.sentence()}")
            finally:  # also after a round of which a callback raises an error
                last = number == (stopped.round if stopped else rounds)
                journal.add(record, sim.state, best, kept, last=last)
            tracked.round(record)
            tell.round(record, setup.metric)
            if last:
                break
    except (KeyboardInterrupt, Exception):
        journal.write()  # all complete rounds are kept, whatever checkpoint_every says
        raise
    finally:
        tell.stop()
        tracked.close()
    if best is None or kept is None:  # a finished run whose best checkpoint was lost: the last round stands in
        best, kept = records[-1]["round"], sim.state
    last = records[-1]["round"]
    both = both_tests(sim, last, engine)
    sim.state = kept
    views = sim.views(best, engine)
    outputs = sim.all_predictions(best, engine)
    predictions, validation = outputs["test"], outputs["validation"]
    if both:
        selected = both if best == last else both_tests(sim, best, engine)
        both = {"selected": {"round": best, **selected}, "last": {"round": last, **both}}
    result = Result(
        config,
        out,
        table_rows(setup, records, best),
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
        validation,
        _held_out(setup, best, engine, tell) if chosen_from else None,
        budget=setup.budget,
        stopped=stopped,
        mixed=setup.mixed,
    )
    if folder:
        models = partial(write_models, folder, result, federation, len(federation.names))
        with files.together(3 + 2 * len(federation.names)):
            folder.write_predictions(predictions)
            if adopt.wanted(config):
                folder.write_predictions(validation, VALIDATION)
            folder.write_held_out(result.held_out)
            thread.do([models]) if thread else models()
    return result


def _held_out(setup: Setup, rounds: int, engine: ClientRunner, tell: Progress) -> Predictions | None:
    who = tiny_clients(setup)
    if who:
        words = f"{len(who)} of {len(setup.federation.names)} clients have fewer than {TINY} validation examples"
        tell.say(f"{setup.config.method}: {words}; for their choice, {rounds} rounds in each of some folds")
    return predict_held_out(setup, rounds, engine)


@timed("write")
def write_models(folder: RunFolder, result: Result, federation: Federation, population: int) -> None:
    """Write each client's model, how to rebuild it, and how its table was prepared.

    Args:
        folder: the run folder.
        result: has the models, as views.
        federation: the clients in `result`, in the same order.
        population: how many clients trained together.
    """
    config = result.config
    for i, row in enumerate(result.clients):
        about = {
            "method": config.method,
            "hyper": config.hyper,
            "model": config.model if result.mixed is None else result.mixed.model(i),
            "adapter": config.adapter,
            "head": config.head,
            "kind": result.task.kind,
            "target": result.task.target.to_json(),
            "num_classes": federation.num_classes,
            "outputs": num_outputs(federation),
            "input_shape": list(federation.x.shape[1:]),
            "input_dtype": input_dtype(federation, result.task_of(i)),
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
        folder.write_model(row["client"], client_rows.take(result.views, i), about)
        if row["client"] in federation.preprocessing:
            folder.write_preprocessing(row["client"], dict(federation.preprocessing[row["client"]]))


def _best_on_disk(folder: RunFolder, like: State, done: int, best: int | None) -> tuple[int | None, State | None]:
    """Return the best round so far and the state after it, or None for both."""
    if best is None or best == done:
        return best, like if best is not None else None
    try:
        return best, folder.load(best, like)[0]
    except CheckpointError:
        return None, None  # the best one is damaged: select again among what follows


def local_like(method: AnyMethod) -> AnyMethod:
    """Return local training with the optimiser of `method`."""
    from coterie.methods import Local

    optimizer = getattr(getattr(method, "optimizer", None), "unguarded", None)
    return Local(optimizer) if optimizer is not None else Local()
