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
from coterie.cli.flags import WITH_SETTINGS
from coterie.cli.memory import keep_freed_memory
from coterie.cli.panels import Listed

# A traceback with local variables would write a site's data to the log.
app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_show_locals=False
)
app.command(**WITH_SETTINGS)(run.run)
app.command(cls=Listed)(demo.demo)
app.command(**WITH_SETTINGS)(plan.plan)
app.command(cls=Listed)(resume.resume)
app.command(**WITH_SETTINGS)(compare.compare)
app.command(**WITH_SETTINGS)(attack.attack)
app.command(**WITH_SETTINGS)(tune.tune)
app.command(**WITH_SETTINGS)(recommend.recommend)
app.command(cls=Listed)(report.report)
app.command(cls=Listed)(predict.predict)
app.command(cls=Listed)(export.export)
app.command(cls=Listed)(onboard.onboard)
app.command(cls=Listed)(methods.methods)
app.command(cls=Listed)(laws.laws)
data.app.command(cls=Listed)(data_schema.schema)
app.add_typer(data.app, name="data")
app.command(cls=Listed)(reproduce.reproduce)
app.command(cls=Listed)(doctor.doctor)
app.add_typer(flower.app, name="flower")
app.command(cls=Listed)(site.site)


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
