"""`coterie data schema`: infer a schema from the sites' files, for all sites to agree on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as RichTable

from coterie.cli.console import say, show, stdout
from coterie.cli.errors import report_errors
from coterie.core.errors import ConfigError, CoterieError
from coterie.data.tables.reading import MISSING, Table
from coterie.data.tables.schema import Schema
from coterie.data.tables.silos import Silos, agree_on_schema
from coterie.data.tasks import TASKS
from coterie.experiment.silos import find_files
from coterie.storage import files as on_disk


def schema(
    files: Annotated[
        list[str], typer.Argument(help="one CSV or Parquet file per site, or a folder of them", metavar="FILES")
    ],
    target: Annotated[str, typer.Option(help="the column to predict, or a comparison such as num>0")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="write the schema to this file", metavar="FILE")
    ] = None,
    columns: Annotated[str | None, typer.Option(help="column names, if the files have no header: a,b,c")] = None,
    missing: Annotated[
        str | None, typer.Option(help=f"cells that mean a missing value ({','.join(MISSING[1:])})")
    ] = None,
    site_column: Annotated[
        str | None, typer.Option(help="column with the name of the site, if one file holds all sites")
    ] = None,
    group: Annotated[str | None, typer.Option(help="column that identifies the patient; not used as an input")] = None,
    drop: Annotated[str | None, typer.Option(help="columns to leave out: a,b,c")] = None,
    regression: Annotated[
        bool | None, typer.Option(help="treat the target as a number (default: decided from its values)")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="what kind of target it is: multilabel, ordinal, survival, cox, multitask")
    ] = None,
    horizons: Annotated[
        str | None, typer.Option(help="for survival: the ends of the intervals of time: 30,90,365")
    ] = None,
    levels: Annotated[str | None, typer.Option(help="for ordinal: the levels in their order: low,mid,high")] = None,
) -> None:
    """Infer the columns of the sites' files, show them, and write a schema for all sites to agree on.

    Use it with 'coterie run --silos FILES --schema FILE.toml', which reports every column of every file that does not
    match.
    """
    with report_errors():
        try:
            found = find_files(files)
        except ValueError as error:
            raise ConfigError([str(error)]) from None
        if site_column is not None and len(found) > 1:
            raise ConfigError([f"--site-column is for a single file with all sites, but {len(found)} files are given"])
        if task is not None and task not in TASKS:
            raise ConfigError([f"--task {task}: choose from {', '.join(TASKS)}"])
        silos = Silos(
            tuple(found),
            target=target,
            columns=_names(columns),
            missing=MISSING if missing is None else _names(missing),
            site_column=site_column,
            group=group,
            drop=_names(drop),
            regression=regression,
            task=task,
            horizons=_numbers(horizons),
            levels=_names(levels),
        )
        agreed, sites = agree_on_schema(silos)
        console = stdout()
        show(console, schema_table(agreed, sites))
        for line in agreed.describe()[: max(1, len(agreed.outcomes))]:
            say(console, line)
        if out is None:
            say(console, "Add -o schema.toml to write it to a file.", "dim")
            return
        if out.exists():
            raise CoterieError(f"'{out}' already exists: choose another name, or delete it")
        on_disk.write_text(out, agreed.to_toml())
        say(console, f"Written to {out}")


def schema_table(schema: Schema, sites: dict[str, Table]) -> RichTable:
    """Return one row per column: its kind, its categories, and the share of missing cells at each site."""
    table = RichTable(
        title="Columns, and the share of missing cells at each site", title_justify="left", title_style="bold"
    )
    for heading in ("column", "kind", "categories"):
        table.add_column(heading)
    for name in sites:
        table.add_column(name, justify="right")
    rows = [(column.name, column.kind, ", ".join(column.categories)) for column in schema.columns]
    wanted = dict.fromkeys(schema.target_columns(list(next(iter(sites.values())).columns)))
    classes = {each.columns[0]: ", ".join(each.classes) for each in schema.outcomes}
    for name, kind, categories in [
        *rows,
        *((each, "target", classes.get(each, ", ".join(schema.classes))) for each in wanted),
    ]:
        shares = [sum(cell is None for cell in site.columns[name]) / len(site) for site in sites.values()]
        table.add_row(name, kind, categories, *map(_percent, shares))
    table.add_section()
    table.add_row("rows", "", "", *(str(len(site)) for site in sites.values()))
    return table


def _percent(share: float) -> str:
    return "" if not share else f"{100 * share:.0f} %" if share >= 0.01 else "< 1 %"


def _numbers(text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in _names(text))
    except ValueError:
        raise ConfigError([f"--horizons {text}: give times, as in 30,90,365"]) from None


def _names(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(name.strip() for name in text.split(","))
