"""`coterie recommend`: which method suits this federation, or none."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from coterie.cli.compare import names_of
from coterie.cli.console import say, show, stdout
from coterie.cli.errors import report_errors, with_problems
from coterie.cli.flags import with_settings
from coterie.cli.progress import watch
from coterie.cli.recommend_words import look_lines, panel_table, plan_lines, sentences
from coterie.cli.request import Request
from coterie.cli.run import Quiet, describe, measures, schema_lines
from coterie.experiment.resolve import default_out
from coterie.experiment.tuning.panel import PANEL
from coterie.experiment.tuning.recommend import FOLDS, TRIALS, look_at, prepare_panel, run_panel
from coterie.experiment.tuning.recommendation import Recommendation


@with_settings("method", "reference")
def recommend(
    ctx: typer.Context,
    *,
    methods: Annotated[
        str | None,
        typer.Option(
            help=f"the panel, separated by commas, from cheap to dear (default: {','.join(PANEL)})", metavar="NAMES"
        ),
    ] = None,
    trials: Annotated[int, typer.Option(help="number of candidates of each method, in each fold", min=1)] = TRIALS,
    folds: Annotated[int, typer.Option(help="how often another part of each site's data is held out", min=2)] = FOLDS,
    out: Annotated[
        Path | None,
        typer.Option(
            help="folder for what is found; what is there already is not done again (default: a new one in runs/)",
            metavar="FOLDER",
        ),
    ] = None,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Recommend a method for a federation, or training alone if nothing is known to beat it.

    A panel of methods, from cheap to dear, is tuned with the same budget inside each site's data, again and again
    with another part held out, and compared on what was held out. It says which method to use, how sure that is, who
    gains and who would lose, and what it costs, and writes federation.toml for 'coterie run' and 'coterie flower'.

    The run's test examples are not looked at, so that a run of what is recommended has an honest test.
    """
    with report_errors() as stopped:
        request = Request(ctx, settings)
        given = request.values.get("methods") or list(PANEL)
        for key in ("method", "reference", "methods"):
            request.take(key, None)
        names = names_of(methods or given)
        request.add_method_flags(names)
        data = request.take("data", None)
        words: dict[str, Any] = {"trials": trials, "folds": folds}
        panel = with_problems(request.problems, lambda: prepare_panel(data, names, **words, **request.values))
        path = out or default_out(panel.setup.config.model_copy(update={"method": "recommend"}))
        stopped.debug = panel.setup.config.debug
        stopped.advice = f"To continue, run the same command with --out {shlex.quote(str(path))}"
        console = stdout()
        if not quiet:
            say(console, f"recommend a method for {describe(panel.setup)}, seed {panel.setup.config.seed}")
            looked = look_lines(look_at(panel.setup.federation, panel.setup.config.seed))
            for line in [*schema_lines(panel.setup.federation), *looked, *plan_lines(panel)]:
                say(console, line)
        with watch(quiet, measures=measures(panel.setup.config), debug=panel.setup.config.debug) as progress:
            found = run_panel(panel, path, progress=progress)
        if not quiet:
            say(console, "The run's test examples were not looked at.")
        print_found(console, found, quiet=quiet)


def print_found(console: Console, found: Recommendation, *, quiet: bool) -> None:
    """Print what is recommended, and where its settings are."""
    show(console, panel_table(found))
    for line in sentences(found):
        say(console, line)
    if quiet:
        return
    file = shlex.quote(str(found.path))
    say(console, f"Its settings are in {found.path}:")
    say(console, f"  coterie run {file}")
    say(console, f"  coterie flower up {file} --sites {found.look.sites}")
    say(console, f"  coterie flower init APP {file} --sites {found.look.sites}    # for real machines")
