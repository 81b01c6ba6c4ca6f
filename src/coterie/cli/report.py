"""`coterie report`: finished runs in pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import say, stdout
from coterie.cli.errors import in_words
from coterie.report import write, write_figures


def report(
    runs: Annotated[list[Path], typer.Argument(help="run folders, or a folder of runs", metavar="RUN")],
    out: Annotated[
        Path | None,
        typer.Option(help="the file (default: report.html in RUN; of several, in the current folder)", metavar="FILE"),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(help="also write every figure as PNG and SVG into this folder", metavar="DIR"),
    ] = None,
) -> None:
    """Write one HTML file that shows a run, or compares several.

    It needs no network and no server: open it in a browser, or send it to someone. Several runs must be of the same
    data. A folder that 'coterie compare' has written stands for all its runs.
    """
    with in_words():
        path = write(runs, out or (runs[0] if len(runs) == 1 else Path()) / "report.html")
        say(stdout(), f"Written to {path}")
        if figures is not None:
            made = write_figures(runs, figures)
            say(stdout(), f"{len(made)} images written to {figures}")
