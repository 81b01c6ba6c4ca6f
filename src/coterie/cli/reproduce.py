"""`coterie reproduce`: run a table of a paper and compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as RichTable

from coterie.cli.console import say, stdout
from coterie.cli.errors import report_errors
from coterie.cli.progress import watch
from coterie.experiment.reproduce import TABLES, find_table, markdown
from coterie.experiment.reproduce import reproduce as run_table


def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="[TABLE]", help="the table to run; leave it out to list them")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="number of seeds, if not that of the table")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="number of rounds, if not that of the table")] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="folder for its runs")] = Path("runs/reproduce"),
    quiet: Annotated[bool, typer.Option("--quiet", help="print the final table only")] = False,
) -> None:
    """Run a table of a paper, and print the paper's numbers beside the measured ones.

    Each entry is a separate run in FOLDER/TABLE. After Ctrl-C, run the same command again to continue.
    """
    console = stdout()
    with report_errors() as stopped:
        if name is None:
            console.print(_listing())
            return
        table = find_table(name)
        stopped.advice = f"To continue: coterie reproduce {name} --out {out}"
        minutes = table.minutes * (seeds or table.seeds) / table.seeds
        if rounds is None and not quiet:
            long = " You can stop it and continue later with the same command." if minutes > 20 else ""
            say(console, f"{table.title}: about {minutes:.0f} minutes on two cores.{long}")
        with watch(quiet, measures=True) as progress:
            rows = run_table(name, out, seeds=seeds, rounds=rounds, progress=progress)
        from rich.markdown import Markdown  # with its parser: no other command needs them

        console.print(Markdown(markdown(name, rows)))


def _listing() -> RichTable:
    listing = RichTable("table", "what", "seeds", "minutes on two cores")
    for name, table in TABLES.items():
        listing.add_row(name, table.title, str(table.seeds), f"about {table.minutes:.0f}")
    return listing
