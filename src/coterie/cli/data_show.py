"""`coterie data show` draws a federation before any training; `coterie data settings` lists published experiments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from coterie.cli.console import say, show, stdout
from coterie.cli.errors import report_errors
from coterie.core.errors import ConfigError
from coterie.core.extensions import about_entry, added, suggest
from coterie.data import SOURCES
from coterie.data.loading import is_known
from coterie.data.partition import PARTITIONS
from coterie.experiment.federations import make_federation
from coterie.experiment.resolve import resolve
from coterie.experiment.settings import find_setting, settings
from coterie.storage import files


def data_show(
    name: Annotated[
        str,
        typer.Argument(help="a setting (see 'coterie data settings'), a data set, a file, or package.module:function"),
    ],
    partition: Annotated[
        str | None, typer.Option(help="how to split it among clients, such as dirichlet:0.3", metavar="SPEC")
    ] = None,
    clients: Annotated[str | None, typer.Option(help="number of clients", metavar="INTEGER")] = None,
    seed: Annotated[
        str | None, typer.Option(help="seed of the partition and the splits (default: 0)", metavar="INTEGER")
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="folder with the data sets (default: COTERIE_DATA)")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="the HTML file to write (default: ./NAME.html)", metavar="FILE")
    ] = None,
) -> None:
    """Draw which client has which classes and how many examples, and print how much the clients' labels differ."""
    with report_errors():
        # The drawing library takes a while to import.
        from coterie.report.federation import page, summary
        from coterie.report.page import render

        known = name in settings()
        if not known and not is_known(name) and not Path(name).exists():
            close = suggest(name, [*settings(), *SOURCES])
            raise ConfigError([f"there is no setting, data set or file '{name}'{close}; 'coterie data' lists them"])
        values: dict[str, Any] = {"setting" if known else "data": name, "partition": partition, "clients": clients}
        config, _ = resolve({**values, "seed": seed, "data_dir": data_dir})
        federation = make_federation(config)
        how = f"{config.data}{f' by {config.partition}' if config.partition else ''}, seed {config.seed}"
        about = find_setting(name).about if known else SOURCES[name].about if name in SOURCES else "your own data"
        target = out or Path(re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") + ".html")
        files.write_text(target, render(page(name, f"{about} ({how})", federation)))
        console = stdout()
        say(console, f"{name}: {how}, {len(federation.names):,} client{'s' * (len(federation.names) != 1)}")
        for line in summary(federation):
            say(console, f"  {line}")
        say(console, f"Written to {target}")


def data_settings() -> None:
    """List the published experiments (--setting) and the partitions (--partition)."""
    console = stdout()
    table = _table("Published experiments (--setting)", "name", "what it is", "where", "data", "partition", "model")
    for name, each in settings().items():
        cells = [str(each.values.get(key, "")) for key in ("data", "partition", "model")]
        table.add_row(name, each.about, each.table, *cells)
    show(console, table)
    say(console, "'coterie data show NAME' draws one. Flags and your own file override the values of a setting.")
    kinds = _table("Partitions (--partition)", "usage", "what it is")
    for partition in PARTITIONS.values():
        kinds.add_row(partition.usage, partition.about)
    for name, entry in added("partition").items():
        kinds.add_row(*about_entry("partition", name, entry))
    show(console, kinds)
    say(console, "Your own: --partition package.module:function:OPTION (docs/extend-data.md).")
    say(console, "Add :share=0.25 to any of them to use that share of the examples, or :take=5000 to use that number.")


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, heading in enumerate(headings):
        table.add_column(heading, no_wrap=i == 0, style="bold" if i == 0 else "")
    return table
