"""`coterie reproduce`: the papers' tables, beside what is measured here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markdown import Markdown
from rich.table import Table as RichTable

from coterie.cli.console import say, stdout
from coterie.cli.errors import in_words
from coterie.cli.progress import watch
from coterie.experiment.reproduce import TABLES, find_table, markdown
from coterie.experiment.reproduce import reproduce as run_table


def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="[TABLE]", help="which table; none lists them")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="fewer or more seeds than the table has")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="fewer rounds, for a first look")] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="where its runs are kept")] = Path("runs/reproduce"),
    quiet: Annotated[bool, typer.Option("--quiet", help="print the final table only")] = False,
) -> None:
    """Run a paper's table and print paper and measured side by side.

    Each entry is a run of its own in FOLDER/TABLE: stopped with Ctrl-C, the same command goes on.
    """
    console = stdout()
    with in_words() as ending:
        if name is None:
            console.print(_listing())
            return
        table = find_table(name)
        ending.advice = f"The same command goes on: coterie reproduce {name} --out {out}"
        minutes = table.minutes * (seeds or table.seeds) / table.seeds
        if rounds is None and not quiet:
            long = " It can be stopped and goes on with the same command." if minutes > 20 else ""
            say(console, f"{table.title}: about {minutes:.0f} minutes on two cores.{long}")
        with watch(quiet, measures=True) as progress:
            rows = run_table(name, out, seeds=seeds, rounds=rounds, progress=progress)
        console.print(Markdown(markdown(name, rows)))


def _listing() -> RichTable:
    listing = RichTable("table", "what", "seeds", "minutes on two cores")
    for name, table in TABLES.items():
        listing.add_row(name, table.title, str(table.seeds), f"about {table.minutes:.0f}")
    return listing
