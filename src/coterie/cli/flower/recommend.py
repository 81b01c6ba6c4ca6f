"""`coterie flower recommend`: recommend a method on this machine, as it would be done on several."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from coterie.cli.compare import names_of
from coterie.cli.console import say, stdout
from coterie.cli.errors import report_errors, with_problems
from coterie.cli.flags import with_settings
from coterie.cli.flower.require import require_flower
from coterie.cli.flower.table import watch_sites
from coterie.cli.flower.up import Limit
from coterie.cli.recommend import print_found
from coterie.cli.request import Request
from coterie.cli.run import Quiet, describe
from coterie.core.errors import ConfigError
from coterie.experiment.config import TABLES, Config
from coterie.experiment.given import sort_settings
from coterie.experiment.resolve import default_out
from coterie.experiment.setup import prepare
from coterie.experiment.tuning.panel import PANEL
from coterie.experiment.tuning.recommend import FOLDS, TRIALS
from coterie.experiment.tuning.recommendation import read_recommendation
from coterie.methods import METHODS


@with_settings("method", "reference", "debug")
def recommend(
    ctx: typer.Context,
    *,
    sites: Annotated[int, typer.Option(help="number of the data set's clients that take part", min=1)] = 4,
    methods: Annotated[
        str | None,
        typer.Option(
            help=f"the panel, separated by commas, from cheap to dear (default: {','.join(PANEL)})", metavar="NAMES"
        ),
    ] = None,
    trials: Annotated[int, typer.Option(help="number of candidates of each method, in each fold", min=1)] = TRIALS,
    folds: Annotated[int, typer.Option(help="how often another part of each site's data is held out", min=2)] = FOLDS,
    deadline: Annotated[float, typer.Option(help="seconds after which a round closes", metavar="SECONDS")] = 300.0,
    quorum: Annotated[
        float, typer.Option(help="share of the sites that must answer in a round", min=0.01, max=1.0)
    ] = 0.5,
    out: Annotated[Path | None, typer.Option(help="folder for what is found (default: a new one in runs/)")] = None,
    limit: Limit = 6 * 3600.0,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Start a SuperLink and SuperNodes on this machine, and recommend a method as 'coterie recommend' does.

    The panel is trained at the sites. They send models as they do in training, and of their data only scores and
    counts: what methods predict stays with them. The same is done on real machines by an app with deploy.recommend
    (docs/deploy.md).
    """
    with report_errors() as stopped:
        require_flower()
        from coterie.deploy.up import part_of, recommend_up

        request = Request(ctx, settings)
        listed = request.values.get("methods") or list(PANEL)
        for key in ("method", "reference", "methods"):
            request.take(key, None)
        names = names_of(methods or listed)
        request.add_method_flags(names)
        given = _given(request.values)
        if unknown := [name for name in names if name not in METHODS]:
            request.problems.append(f"--methods {','.join(unknown)}: sites know the methods of 'coterie methods' only")
        setup = part_of(with_problems(request.problems, lambda: _prepare(names, request.values)), sites)
        path = out or default_out(setup.config.model_copy(update={"method": "recommend"}))
        stopped.advice = f"To continue: coterie flower resume {shlex.quote(str(path))}"
        console = stdout()
        if not quiet:
            say(console, f"recommend a method for {describe(setup)}; each client is a site on this machine")
            say(console, "Starting a SuperLink, and a SuperNode and a worker for each site", "dim")
        deploy: dict[str, Any] = {"deadline": deadline, "quorum": quorum, "joining": max(deadline, 120.0)}
        deploy |= {"recommend": ",".join(names), "trials": trials, "folds": folds, "given": given}
        with watch_sites(console, quiet) as watch:
            recommend_up(setup, path, deploy, watch, limit)
        print_recommended(console, path, quiet=quiet)


def print_recommended(console: Console, path: Path, *, quiet: bool) -> None:
    """Print what a federation of sites found."""
    print_found(console, read_recommendation(path), quiet=quiet)


def _given(values: Mapping[str, Any]) -> str:
    """Return the hyper-parameters that were given, as deploy.given has them."""
    tables = [values[table] for table in TABLES if isinstance(values.get(table), Mapping)]
    found = {key: value for table in tables for key, value in table.items() if key != "name"}
    found |= {key: value for key, value in values.items() if key not in Config.model_fields}
    if wrong := [key for key, value in found.items() if "," in str(value)]:
        raise ConfigError([f"{key} = {found[key]!r}: a value with a comma cannot be sent to sites" for key in wrong])
    return ", ".join(f"{key}={value}" for key, value in found.items() if value is not None)


def _prepare(names: list[str], values: Mapping[str, Any]) -> Any:
    """Prepare training by the first method of the panel, with those settings that it has."""
    known = sort_settings(names[0], {key: value for key, value in values.items() if value is not None})
    fields = {key: value for key, value in known.items() if key in Config.model_fields and key != "hyper"}
    return prepare(names[0], **fields)
