"""The command line: one file a command."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from coterie.cli import (
    compare,
    data,
    data_schema,
    export,
    flower,
    methods,
    onboard,
    predict,
    report,
    reproduce,
    resume,
    run,
    site,
)
from coterie.cli.flags import TAKES_MORE, USAGE

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
app.command(context_settings=TAKES_MORE, options_metavar=USAGE)(run.run)
app.command()(resume.resume)
app.command(context_settings=TAKES_MORE, options_metavar=USAGE)(compare.compare)
app.command()(report.report)
app.command()(predict.predict)
app.command()(export.export)
app.command()(onboard.onboard)
app.command()(methods.methods)
data.app.command()(data_schema.schema)
app.add_typer(data.app, name="data")
app.command()(reproduce.reproduce)
app.add_typer(flower.app, name="flower")
app.command()(site.site)


def _version(asked: bool) -> None:
    if asked:
        from coterie import __version__

        typer.echo(f"coterie {__version__}")
        raise typer.Exit


@app.callback()
def coterie(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Personalised federated learning: every site ends with a model of its own, and is told whether it helped."""


def main() -> None:
    # Methods and models of the user's own, as package.module:name, are looked for in the current folder too.
    sys.path.append(os.getcwd())
    app(prog_name="coterie")
