"""`coterie resume`: continue a run that was stopped."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import stdout
from coterie.cli.errors import report_errors
from coterie.cli.progress import watch
from coterie.cli.run import Bmta, Quiet
from coterie.cli.tables import print_result
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
) -> None:
    """Continue a stopped run from its last checkpoint.

    If the run is complete, its result is shown.
    """
    with report_errors() as stopped:
        stopped.advice = f"To continue: coterie resume {shlex.quote(str(run))}"
        measures = (run / "config.toml").exists() and not (run / "engine.json").exists()
        with watch(quiet, measures=measures) as progress:
            result = resume_run(run, device=device, progress=progress)
        print_result(stdout(), result, quiet=quiet, bmta=bmta)
