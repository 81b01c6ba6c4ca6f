"""`coterie report`: write an HTML report of finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import say, stdout
from coterie.cli.errors import report_errors
from coterie.core.errors import ConfigError
from coterie.report import write, write_figures
from coterie.report.user_sections import problems_of


def report(
    runs: Annotated[list[Path], typer.Argument(help="run folders, or a folder of runs", metavar="RUN")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="the file to write (default: report.html in RUN, or in the current folder for several runs)",
            metavar="FILE",
        ),
    ] = None,
    section: Annotated[
        list[str] | None,
        typer.Option(
            help="add a section beside those that the runs name, once for each: package.module:function:option=value",
            metavar="SECTION",
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(help="also write every figure as PNG and SVG into this folder", metavar="DIR"),
    ] = None,
) -> None:
    """Write one HTML file that shows a run, or compares several.

    The file needs no network and no server: open it in a browser, or send it to someone. Several runs must use the same
    data. To include all runs of 'coterie compare', give its folder.
    """
    with report_errors():
        if problems := problems_of(section or ()):
            raise ConfigError(problems)
        path = write(runs, out or (runs[0] if len(runs) == 1 else Path()) / "report.html", sections=section or ())
        say(stdout(), f"Written to {path}")
        if figures is not None:
            made = write_figures(runs, figures)
            say(stdout(), f"{len(made)} images written to {figures}")
