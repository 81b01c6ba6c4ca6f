"""`coterie resume`: go on with a run that was stopped."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import stdout
from coterie.cli.errors import in_words
from coterie.cli.progress import watch
from coterie.cli.run import Bmta, Quiet
from coterie.cli.tables import print_result
from coterie.experiment.run import resume as go_on


def resume(
    run: Annotated[Path, typer.Argument(help="the run folder", metavar="RUN")],
    quiet: Quiet = False,
    bmta: Bmta = False,
    device: Annotated[
        str | None, typer.Option(help="go on there: cpu, cuda, cuda:1, mps (default: where it was)", metavar="TEXT")
    ] = None,
) -> None:
    """Go on with a stopped run from its last checkpoint.

    Of a run that is complete, the result is shown.
    """
    with in_words() as ending:
        ending.advice = f"Go on with: coterie resume {shlex.quote(str(run))}"
        measures = (run / "config.toml").exists() and not (run / "engine.json").exists()
        with watch(quiet, measures=measures) as progress:
            result = go_on(run, device=device, progress=progress)
        print_result(stdout(), result, quiet=quiet, bmta=bmta)
