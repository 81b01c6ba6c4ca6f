"""`coterie resume`: continue a run that was stopped."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.console import stdout
from coterie.cli.errors import report_errors
from coterie.cli.progress import watch
from coterie.cli.run import Bmta, Quiet
from coterie.cli.tables import print_result
from coterie.experiment.run import read_config
from coterie.experiment.run import resume as resume_run


def resume(
    run: Annotated[Path, typer.Argument(help="the run folder", metavar="RUN")],
    quiet: Quiet = False,
    bmta: Bmta = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="continue on this device: cpu, cuda, cuda:1, mps (default: the same as before)", metavar="TEXT"
        ),
    ] = None,
    take_home: Annotated[
        str | None,
        typer.Option(help="what a client keeps: federated or best (default: the same as before)", metavar="TEXT"),
    ] = None,
    take_home_errors: Annotated[
        float | None,
        typer.Option(help="by how many standard errors it must be better than the local model", min=0, max=10),
    ] = None,
    take_home_folds: Annotated[
        int | None, typer.Option(help="folds of cross-validation where validation is tiny; 0: none", min=0, max=20)
    ] = None,
    calibrate: Annotated[
        bool | None, typer.Option("--calibrate/--no-calibrate", help="calibrate what a client keeps")
    ] = None,
    threshold: Annotated[
        str | None,
        typer.Option(help="of two classes: choose the threshold that is best for this metric", metavar="METRIC"),
    ] = None,
) -> None:
    """Continue a stopped run from its last checkpoint.

    If the run is complete, its result is shown; its clients may then still choose what they take home.
    """
    with report_errors() as stopped:
        stopped.advice = f"To continue: coterie resume {shlex.quote(str(run))}"
        begun = (run / "config.toml").exists()
        measures, debug = begun and not (run / "engine.json").exists(), begun and read_config(run).get("debug", False)
        stopped.debug = debug
        with watch(quiet, measures=measures and not debug, debug=debug) as progress:
            taking: dict[str, Any] = {"take_home": take_home, "calibrate": calibrate, "threshold": threshold}
            taking |= {"take_home_errors": take_home_errors, "take_home_folds": take_home_folds}
            result = resume_run(run, device=device, progress=progress, **taking)
        print_result(stdout(), result, quiet=quiet, bmta=bmta)
