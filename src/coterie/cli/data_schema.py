"""`coterie data schema`: what sites' files hold, as a schema that all sites can agree on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as Shown

from coterie.cli.console import say, show, stdout
from coterie.cli.errors import in_words
from coterie.data.schema import Schema, parse_target
from coterie.data.silos import Silos, agree
from coterie.data.tables import MISSING, Table
from coterie.errors import ConfigError, CoterieError
from coterie.experiment import files as on_disk
from coterie.experiment.silos import find_files


def schema(
    files: Annotated[list[str], typer.Argument(help="one CSV or Parquet file a site, or a folder", metavar="FILES")],
    target: Annotated[str, typer.Option(help="the column to predict, or a comparison such as num>0")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="write the schema there", metavar="FILE")] = None,
    columns: Annotated[str | None, typer.Option(help="names of columns, if files have no header: a,b,c")] = None,
    missing: Annotated[
        str | None, typer.Option(help=f"cells that mean a missing value ({','.join(MISSING[1:])})")
    ] = None,
    site_column: Annotated[
        str | None, typer.Option(help="the column that names the site, if all are in one file")
    ] = None,
    group: Annotated[str | None, typer.Option(help="the column that names the patient; no input")] = None,
    drop: Annotated[str | None, typer.Option(help="columns to leave out: a,b,c")] = None,
    regression: Annotated[bool | None, typer.Option(help="the target is a number; by default as it looks")] = None,
) -> None:
    """Infer what sites' files hold, show it, and write it for all sites to agree on.

    'coterie run --silos FILES --schema FILE.toml' then uses it, and tells which column of which file does not fit.
    """
    with in_words():
        try:
            found = find_files(files)
        except ValueError as error:
            raise ConfigError([str(error)]) from None
        if site_column is not None and len(found) > 1:
            raise ConfigError([f"--site-column is for one file with all sites, not for {len(found)}"])
        silos = Silos(
            tuple(found),
            target=target,
            columns=_names(columns),
            missing=MISSING if missing is None else _names(missing),
            site_column=site_column,
            group=group,
            drop=_names(drop),
            regression=regression,
        )
        agreed, sites = agree(silos)
        console = stdout()
        show(console, schema_table(agreed, sites))
        for line in agreed.words()[:1]:
            say(console, line)
        if out is None:
            say(console, "Write it with -o schema.toml", "dim")
            return
        if out.exists():
            raise CoterieError(f"'{out}' is there already: name another file, or remove it")
        on_disk.write_text(out, agreed.to_toml())
        say(console, f"Written to {out}")


def schema_table(schema: Schema, sites: dict[str, Table]) -> Shown:
    """One line a column: its kind, what it may be, and the share of missing cells at each site."""
    table = Shown(
        title="Columns, and the share of missing cells at each site", title_justify="left", title_style="bold"
    )
    for heading in ("column", "kind", "categories"):
        table.add_column(heading)
    for name in sites:
        table.add_column(name, justify="right")
    target = parse_target(schema.target, list(next(iter(sites.values())).columns)).column
    rows = [(column.name, column.kind, ", ".join(column.categories)) for column in schema.columns]
    for name, kind, categories in [*rows, (target, "target", ", ".join(schema.classes))]:
        shares = [sum(cell is None for cell in site.columns[name]) / len(site) for site in sites.values()]
        table.add_row(name, kind, categories, *map(_percent, shares))
    table.add_section()
    table.add_row("rows", "", "", *(str(len(site)) for site in sites.values()))
    return table


def _percent(share: float) -> str:
    return "" if not share else f"{100 * share:.0f} %" if share >= 0.01 else "< 1 %"


def _names(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(name.strip() for name in text.split(","))
