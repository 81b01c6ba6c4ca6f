"""The command line. Each command has its own file."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from coterie.cli import (
    attack,
    compare,
    data,
    data_schema,
    demo,
    doctor,
    export,
    flower,
    laws,
    methods,
    onboard,
    plan,
    predict,
    recommend,
    report,
    reproduce,
    resume,
    run,
    site,
    tune,
)
from coterie.cli.flags import ALLOW_UNKNOWN_FLAGS, USAGE
from coterie.cli.memory import keep_freed_memory

# A traceback with local variables would write a site's data to the log.
app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_show_locals=False
)
app.command(context_settings=ALLOW_UNKNOWN_FLAGS, options_metavar=USAGE)(run.run)
app.command()(demo.demo)
app.command(context_settings=ALLOW_UNKNOWN_FLAGS, options_metavar=USAGE)(plan.plan)
app.command()(resume.resume)
app.command(context_settings=ALLOW_UNKNOWN_FLAGS, options_metavar=USAGE)(compare.compare)
app.command(context_settings=ALLOW_UNKNOWN_FLAGS, options_metavar=USAGE)(attack.attack)
app.command(context_settings=ALLOW_UNKNOWN_FLAGS, options_metavar=USAGE)(tune.tune)
app.command(context_settings=ALLOW_UNKNOWN_FLAGS, options_metavar=USAGE)(recommend.recommend)
app.command()(report.report)
app.command()(predict.predict)
app.command()(export.export)
app.command()(onboard.onboard)
app.command()(methods.methods)
app.command()(laws.laws)
data.app.command()(data_schema.schema)
app.add_typer(data.app, name="data")
app.command()(reproduce.reproduce)
app.command()(doctor.doctor)
app.add_typer(flower.app, name="flower")
app.command()(site.site)


def _version(request: bool) -> None:
    if request:
        from coterie import __version__

        typer.echo(f"coterie {__version__}")
        raise typer.Exit


@app.callback()
def coterie(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Personalised federated learning: every site gets its own model, and learns whether taking part helped."""


def main() -> None:
    """Run the command line."""
    keep_freed_memory()
    # A method or model given as package.module:name may also be a module in the current folder.
    sys.path.append(os.getcwd())
    app(prog_name="coterie")
