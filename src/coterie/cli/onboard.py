"""`coterie onboard`: give a new site a model from a finished run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import say, show, stdout
from coterie.cli.errors import report_errors
from coterie.cli.predict import OwnModel, Run
from coterie.cli.progress import watch
from coterie.cli.run import Quiet
from coterie.cli.tables import onboarded_sentence, onboarded_table
from coterie.experiment.take_home.onboard import onboard as join


def onboard(
    run: Run,
    data: Annotated[
        Path,
        typer.Option(help="the new site's examples: CSV with a header and a target column, or .npz with x and y"),
    ],
    name: Annotated[str | None, typer.Option(help="name of the site (default: the name of the file)")] = None,
    target: Annotated[str | None, typer.Option(help="the column to predict (default: y, or the last one)")] = None,
    model: OwnModel = None,
    quiet: Quiet = False,
) -> None:
    """Give a new site a personalised model from a finished run.

    The other clients are not trained again, and their data is not needed. The site's examples are split into training,
    validation and test examples. Its model is compared with one trained on its data alone for the same number of steps.
    """
    with report_errors():
        with watch(quiet, measures=False) as progress:
            result = join(run, data, name=name, target=target, model=model, progress=progress)
        console = stdout()
        show(console, onboarded_table([result]))
        if not quiet:
            say(console, onboarded_sentence(result))
            site = shlex.quote(result.names[0])
            say(console, f"Predict with: coterie predict {shlex.quote(str(run))} --client {site} ROWS.csv")
