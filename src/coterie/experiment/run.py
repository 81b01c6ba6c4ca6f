"""Run an experiment: train, evaluate, select a round on validation data, write checkpoints.

A run that was stopped is resumed from its last checkpoint.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.compute.availability import asked_for_plain
from coterie.core.errors import CheckpointError, ConfigError, CoterieWarning
from coterie.core.task import Augment
from coterie.core.toml import read_toml, to_toml
from coterie.data.loading import is_known
from coterie.evaluation.scoring import metrics_of
from coterie.experiment import report_data, stopping, tracking
from coterie.experiment.building import Model
from coterie.experiment.conclude import finish, write_tables
from coterie.experiment.config import OWN_AUGMENT
from coterie.experiment.debugging import debugging
from coterie.experiment.execute import execute, local_like
from coterie.experiment.federations import Data
from coterie.experiment.find_callbacks import FROM_PYTHON
from coterie.experiment.given import OWN_LOSS
from coterie.experiment.mixed import OWN_MODELS, Models
from coterie.experiment.notebook import Heard, listener
from coterie.experiment.pick_engine import Choices
from coterie.experiment.progress import Progress
from coterie.experiment.references import references
from coterie.experiment.result import Result
from coterie.experiment.setup import Setup, prepare
from coterie.experiment.silos import check_files
from coterie.experiment.stopping import Stop
from coterie.experiment.take_home import adopt
from coterie.experiment.training_settings import from_python
from coterie.methods.fields import AnyMethod
from coterie.profiling import Profile, recording, span, timed
from coterie.storage import files
from coterie.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from coterie.experiment.several.turns import RunThread


def run(
    method: str | AnyMethod | None = None,
    data: Data | None = None,
    *,
    model: Model | None = None,
    models: Models | None = None,
    out: str | Path | None = None,
    progress: Heard = None,
    profile: bool = False,
    **settings: Any,
) -> Result:
    """Train a federation and, for comparison, every client alone with the same number of gradient steps.

    Args:
        method: a method's name, or an instance; by default FedMAP.
        data: the name of a data set, a `Federation`, or for each client an (x, y) pair of tensors or a
            `torch.utils.data.Dataset`. By default, eight generated hospitals.
        model: a model's name, an `nn.Module`, or a factory that takes the input shape and the number of outputs.
        models: instead, for clients with different networks: a model for each client's name, a function of the name,
            or words as of `--models`.
        out: where to write the run folder; without it, nothing is written.
        progress: receives news of the run. By default a notebook shows a bar, and all else nothing; False: nothing.
        profile: record where the time goes. The result's `profile` then has it, and `out` gets a trace.json.
        **settings: the keys of `Config` (`rounds`, `seed`, ...; `callbacks` may be objects, too), the method's
            hyper-parameters (`sigma2`, `mu`, ...) and the optimiser's (`optimizer="adam"`, `lr`, ...).
            `setting="pfedvmp/fmnist-50c-dir0.3"` names a published experiment, which provides all of these; what is
            given beside it takes precedence.

    Returns:
        Every client's metrics and model, and the comparison with training alone.

    Raises:
        ConfigError: settings are wrong; it lists every problem.
        DataError: the data are missing or malformed.
        CheckpointError: `out` already holds a run.
        CoterieError: training diverged.

    Examples:
        >>> import coterie
        >>> result = coterie.run("fedavg", "hospitals", model="linear", rounds=2)
        >>> result.names[:3]
        ['north', 'east', 'south']
        >>> 0.5 < result.mean() < 1  # the mean test AUROC
        True
        >>> result.model("north")  # what this client deploys
        Sequential(
          (0): Flatten(start_dim=1, end_dim=-1)
          (1): Linear(in_features=20, out_features=2, bias=True)
        )

        Wrong settings are told all at once:

        >>> coterie.run("fedprox", "hospitals", rounds=0, mu=-1)
        Traceback (most recent call last):
            ...
        coterie.core.errors.ConfigError: ...
    """
    folder = Path(out) if out is not None else None
    with recording(profile) as recorded:
        setup = prepare(method, data, model=model, models=models, **settings)
        result = run_setup(setup, folder, progress=progress)
    return with_profile(result, recorded)


def with_profile(result: Result, recorded: Profile | None) -> Result:
    """Add the recorded profile to the result, and write it to the run folder if there is one."""
    result.profile = recorded
    if recorded and result.path:
        RunFolder(result.path).write_trace(recorded)
    return result


def run_setup(
    setup: Setup,
    out: Path | None,
    *,
    progress: Heard = None,
    resuming: bool = False,
    report: bool = True,
    thread: RunThread | None = None,
    choices: Choices | None = None,
    until: Stop | None = None,
) -> Result:
    """Run a setup, then its local reference, and then whatever follows a run.

    Args:
        setup: what to run.
        out: the run folder, or None to write nothing.
        progress: receives news of the run.
        resuming: `out` already holds this run; continue from its last checkpoint.
        report: write report.html at the end, unless the configuration says not to.
        thread: the thread of this run, if it runs in lockstep with others.
        choices: engines already chosen for similar runs; those chosen here are added.
        until: stop as another run did; by default, early stopping and callbacks decide.

    Returns:
        The result, with the local reference in it unless the configuration says not to run one.

    Raises:
        ConfigError: a tracker is not installed, or has no folder to write to.
        CheckpointError: `out` already holds a run and `resuming` is false, or it cannot be read.
        CoterieError: training diverged.
    """
    with debugging(setup.config):
        return _run(setup, out, listener(progress), resuming, report, thread, choices, until)


def _run(
    setup: Setup,
    out: Path | None,
    tell: Progress,
    resuming: bool,
    report: bool,
    thread: RunThread | None,
    choices: Choices | None,
    until: Stop | None,
) -> Result:
    """Do what `run_setup` says."""
    from coterie.experiment.take_home.onboard import onboard_held_out  # which runs newcomers by `execute`

    beside_local = setup.config.reference and setup.config.method != "local"
    choices = choices or Choices(methods=1 + beside_local)
    asked_for_plain()  # complains of a wrong environment before anything is written
    tracking.check(setup.config.track, out)
    with span("run", run=setup.config.method):
        how: dict[str, Any] = {"resume": resuming, "thread": thread, "choices": choices, "until": until}
        lonely = setup.config.reference and not beside_local  # training alone, and nothing to compare it with
        result = execute(setup, out, tell, **how, chosen_from=not lonely)
    if beside_local:
        alone = setup.with_method(local_like(setup.method)).without_stopping()
        beside = out / "reference" if out else None
        begun = resuming and beside is not None and (beside / "config.toml").exists()
        as_long = None if result.stopped is None else result.stopped.of_reference(setup.config.method)
        with span("run", run="local"):
            result.reference = execute(alone, beside, tell, resume=begun, choices=choices, until=as_long)
        if beside:
            write_tables(result.reference, beside)
    if setup.config.references:
        tell.say("references: scikit-learn's linear models and trees, on own and on pooled data")
        result.references = references(setup.federation, setup.task)
        if out:
            files.write_json(out / "references.json", result.references.to_json())
    if out:
        report_data.write_federation(result, setup.federation, out)
    if setup.held_out:
        result.onboarded = onboard_held_out(result, setup, out, tell)
    finish(result, setup, out, do=thread.do if thread else None)
    if out and report and setup.config.report:
        write_report(out, [out], tell)
    return result


@timed("report")
def write_report(out: Path, runs: list[Path], tell: Progress) -> None:
    """Write report.html into `out`.

    If that fails, only a warning is given: the results are safe, and the report can be written again later.
    """
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
    models: Models | None = None,
    augment: Augment | None = None,
    device: str | None = None,
    callbacks: Sequence[Any] | None = None,
    progress: Heard = None,
    **taking: Any,
) -> Result:
    """Continue a run from its last intact checkpoint, or read back a finished one.

    Args:
        path: the run folder.
        data: the data, if they were given in Python; they must be the same again.
        model: the model, if it was given in Python; it must be the same again.
        models: the clients' models, likewise.
        augment: the augmentation, likewise.
        device: continue on this device; by default on the one the run began on.
        callbacks: the callbacks, if some were given in Python: all of them again.
        progress: receives news of the run.
        **taking: `take_home`, `take_home_errors`, `take_home_folds`, `calibrate` and `threshold`, if clients are to
            choose otherwise what they take home. `optimizer`, `schedule`, `sampler`, `server_optimizer`, `target`,
            `loss` and `metric`, if they were given in Python and have no import path; they must be the same again.

    Returns:
        The result of the whole run.

    Raises:
        CheckpointError: `path` is not a run folder, its input files have changed, or all its checkpoints are damaged.
        ConfigError: the data or the model came from Python and are not given, or another setting is.

    Examples:
        `coterie.run("fedavg", "hospitals", model="linear", rounds=2, out="first")` has written the folder `first`:

        >>> import coterie
        >>> coterie.resume("first").names[:3]
        ['north', 'east', 'south']
    """
    path = Path(path)
    values = read_config(path)
    given = from_python(values) | {"target", "loss", "metric"}
    own = {key: taking.pop(key) for key in given & taking.keys()}
    if other := [key for key in taking if key not in adopt.SETTINGS]:
        raise ConfigError([f"{', '.join(other)}: a run is resumed as it began, but for {', '.join(adopt.SETTINGS)}"])
    if (path / "deployment.json").exists():
        raise CheckpointError(f"'{path}' is a run on other machines: 'coterie flower resume {path}' continues it")
    values |= own | {key: value for key, value in taking.items() if value is not None}
    check_files(path)
    named = {"data": is_known(values["data"]) or "silos" in values, "model": values["model"] != "own-model"}
    named["augment"] = values.get("augment") != OWN_AUGMENT
    named["models"] = values.get("models") != [OWN_MODELS]
    for key, value in {"data": data, "model": model, "models": models, "augment": augment}.items():
        if value is None and not named[key]:
            raise ConfigError(
                [f"this run's {key} came from Python: resume it with coterie.resume('{path}', {key}=...)"]
            )
        if value is not None:
            values[key] = value
    if callbacks is not None:
        values["callbacks"] = callbacks
    elif theirs := [name for name in values.get("callbacks", ()) if name.endswith(FROM_PYTHON)]:
        words = f"this run's callbacks {', '.join(theirs)}: resume it with coterie.resume('{path}', callbacks=[...])"
        raise ConfigError([words])
    if device is not None:
        values["device"] = device
        values.pop("workers", None)
    if values.get("models"):
        values.pop("model")
    if values.get("loss") == OWN_LOSS and "loss" not in own:
        raise ConfigError([f"this run's loss came from Python: resume it with coterie.resume('{path}', loss=...)"])
    setup = prepare(**values | own)
    if "select" not in values:  # an older version began it, which wrote down no default
        setup = replace(setup, metric=metrics_of(setup.task)[0])
    if any(value is not None for value in taking.values()):
        files.write_text(path / "config.toml", stopping.with_note(to_toml(setup.config.to_file()), stopping.read(path)))
    return run_setup(setup, path, progress=progress, resuming=True)


def read_config(path: Path) -> dict[str, Any]:
    """Read config.toml of a run folder; raise `CheckpointError` if `path` is not one."""
    if not (path / "config.toml").exists():
        raise CheckpointError(f"'{path}' is not a run folder: it has no config.toml")
    return read_toml(path / "config.toml")
