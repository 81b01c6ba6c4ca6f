"""`coterie reproduce`: run tables of papers and compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table as RichTable

from coterie.cli.console import say, show, stdout
from coterie.cli.errors import report_errors
from coterie.cli.progress import watch
from coterie.core.errors import ConfigError, DataError
from coterie.experiment.reproduce import shipped
from coterie.experiment.reproduce.cache import Cache
from coterie.experiment.reproduce.figures.catalogue import FIGURES
from coterie.experiment.reproduce.figures.making import made_file, make, sizes_of
from coterie.experiment.reproduce.markdown import heading, hours, markdown
from coterie.experiment.reproduce.measured import measure
from coterie.experiment.reproduce.names import chosen
from coterie.experiment.reproduce.papers import TABLES
from coterie.experiment.reproduce.running import Budget, BudgetSpent, Request, parse_duration, run_missing
from coterie.experiment.reproduce.tables import SIZES, Size

LONG = 20  # minutes, from which on it is said that a table can be stopped


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TABLE]...",
            help="tables and figures: names, a paper's name for all of its tables, or all tables; "
            "leave it out to list them",
        ),
    ] = None,
    size: Annotated[
        Literal["full", "small"],
        typer.Option(help="small: a reduced size, for tables whose full size takes very long"),
    ] = "full",
    seeds: Annotated[int | None, typer.Option(min=1, help="number of seeds, if not that of the table")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="number of rounds, if not that of the table")] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="stop after this time (30m, 2h); the same command continues")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="folder for results")] = Path("runs/reproduce"),
    anew: Annotated[bool, typer.Option("--anew", help="run also what the documentation has results of")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="print the final tables only")] = False,
) -> None:
    """Run tables of papers, and print the papers' numbers beside the measured ones.

    Results are kept in FOLDER by what decides them, so nothing runs twice, and a table is printed as soon as it is
    there. In a clone of the library, what docs/reproduce/results.jsonl holds counts as done, too. After Ctrl-C, or
    when the time is over, run the same command again to continue.
    """
    console = stdout()
    with report_errors() as stopped:
        cache = Cache(out, None if anew else shipped.here())
        if not names:
            show(console, _listing(cache))
            return
        stopped.advice = f"To continue: coterie reproduce {' '.join(names)} --out {out}"
        limit = Budget(None if budget is None else parse_duration(budget))
        figures = [name for name in names if name in FIGURES]
        wanted = chosen([name for name in names if name not in FIGURES], size)
        spent = False
        missing: dict[str, str] = {}
        for name, at in wanted:
            request = Request(TABLES[name], at, seeds, rounds)
            done, number = request.done(cache)
            if not quiet and done < number:
                _announce(name, request, done, number)
            try:
                if done < number and not spent:
                    with watch(quiet, measures=True) as progress:
                        run_missing(request, cache, progress, limit)
            except BudgetSpent as over:
                spent = True
                say(console, f"{name}: {over}")
            except DataError as error:
                if len(wanted) == 1:
                    raise
                missing[name] = str(error)
            _print(name, request, cache)
        for name, why in missing.items():
            say(console, f"{name}: not run, as {why}")
        for name in figures:
            _draw(name, size, cache)


def _draw(name: str, size: Size, cache: Cache) -> None:
    figure = FIGURES[name]
    if size not in sizes_of(figure):
        raise ConfigError([f"{name} has only the size {', '.join(sizes_of(figure))}: leave out --size"])
    if make(name, size, cache) is None:
        tables = " ".join(figure.tables)
        small = " --size small" * (size == "small")
        raise ConfigError([f"{name} is drawn from tables that were not run: first coterie reproduce {tables}{small}"])
    say(stdout(), f"{figure.title}: {made_file(cache, name, size).with_suffix('.svg')}")


def _announce(name: str, request: Request, done: int, number: int) -> None:
    minutes = request.table.minutes_at(request.size, request.seeds) * (number - done) / number
    long = " You can stop it and continue later with the same command." if minutes > LONG else ""
    about = "" if request.rounds is not None else f" about {hours(minutes)} of one core."
    kept = f" {done} of {number} results are there." if done else ""
    say(stdout(), f"{name}: {request.table.title}.{kept}{about}{long}")


def _print(name: str, request: Request, cache: Cache) -> None:
    from rich.markdown import Markdown  # with its parser: no other command needs them

    measured = measure(name, request, cache)
    if measured is None:
        return
    text = f"### {request.table.title}\n\n{heading(request.table, measured)}\n\n{markdown(request.table, measured)}"
    plain = text.replace("<details markdown><summary>", "**").replace("</summary>", "**").replace("</details>", "")
    stdout().print(Markdown(plain))


def _listing(cache: Cache) -> RichTable:
    listing = RichTable("table", "what", "size", "seeds", "one core, about", "done")
    for name, table in TABLES.items():
        for size in table.sizes():
            done, number = Request(table, size).done(cache)
            listing.add_row(
                name if size == SIZES[0] else "",
                table.title if size == SIZES[0] else f"  {table.small_words}",
                size,
                str(table.seeds_at(size)),
                hours(table.minutes_at(size)),
                f"{done} of {number}",
            )
    for name, figure in FIGURES.items():
        for size in sizes_of(figure):
            takes = hours(figure.minutes[size]) if figure.experiment else "its tables"
            drawn = "drawn" if made_file(cache, name, size).exists() else ""
            listing.add_row(name if size == sizes_of(figure)[0] else "", figure.title, size, "1", takes, drawn)
    return listing
