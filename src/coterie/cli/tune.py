"""`coterie tune`: search the settings of methods with equal budgets, and test what was chosen."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.compare import names_of
from coterie.cli.console import say, show, stdout
from coterie.cli.errors import report_errors, with_problems
from coterie.cli.flags import with_settings
from coterie.cli.progress import watch
from coterie.cli.request import Request
from coterie.cli.run import Quiet, describe, measures, schema_lines
from coterie.cli.tables import print_comparison
from coterie.cli.tune_tables import chosen_table, importance_lines, plan_lines
from coterie.experiment.resolve import default_out
from coterie.experiment.tuning.tune import TRIALS, prepare_searches, run_tuning

METHODS = "fedavg,fedmap"


@with_settings("method", "reference")
def tune(
    ctx: typer.Context,
    *,
    methods: Annotated[
        str | None,
        typer.Option(
            help=f"names of the methods, separated by commas; local is added (default: {METHODS})", metavar="NAMES"
        ),
    ] = None,
    trials: Annotated[int, typer.Option(help="number of candidates of each method", min=1)] = TRIALS,
    search: Annotated[
        list[str] | None,
        typer.Option(
            help="also search this, or in this range: lam=0.1..10, lr=1e-3..1:linear, model=mlp|linear, prior",
            metavar="NAME[=RANGE]",
        ),
    ] = None,
    halving: Annotated[
        bool, typer.Option("--halving/--no-halving", help="drop the worse two thirds of the candidates early, twice")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(
            help="folder for the search; what is there already is not done again (default: a new one in runs/)",
            metavar="FOLDER",
        ),
    ] = None,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Search the settings of methods, and of training alone, with the same budget; then test what was chosen.

    Every method has the same number of candidates and of rounds. Only validation examples are looked at while
    searching; test examples once, for what was chosen.

    The step size is searched, and the hyper-parameters of the method in the ranges that 'coterie methods NAME' shows.
    What is given a value (--lr 0.1) is not searched. --search adds to it, and may be given several times.
    """
    with report_errors() as stopped:
        request = Request(ctx, settings)
        given = request.values.get("methods") or request.values.get("method", METHODS)
        for key in ("method", "reference", "methods"):
            request.take(key, None)
        names = names_of(methods or given)
        request.add_method_flags(names)
        words: dict[str, Any] = {"trials": trials, "search": search or [], "halving": halving}
        searches = with_problems(request.problems, lambda: prepare_searches(names, **words, **request.values))
        path = out or default_out(searches.setup.config.model_copy(update={"method": "tune"}))
        stopped.debug = searches.setup.config.debug
        stopped.advice = f"To continue, run the same command with --out {shlex.quote(str(path))}"
        console = stdout()
        if not quiet:
            say(
                console,
                f"tune {', '.join(searches.methods)} on {describe(searches.setup)}, seed {searches.setup.config.seed}",
            )
            for line in [*schema_lines(searches.setup.federation), *plan_lines(searches)]:
                say(console, line)
        with watch(quiet, measures=measures(searches.setup.config), debug=searches.setup.config.debug) as progress:
            tuning = run_tuning(searches, path, progress=progress)
        show(console, chosen_table(tuning))
        if not quiet:
            for line in importance_lines(tuning):
                say(console, line)
        if tuning.comparison is not None and tuning.best != "local":
            print_comparison(console, tuning.comparison, quiet=quiet)
        if not quiet:
            if tuning.best == "local":
                say(console, "On validation data nothing does better than training alone: local is what was chosen.")
            say(
                console,
                f"Test examples were looked at once, for {' and '.join(dict.fromkeys(['local', tuning.best]))}.",
            )
            say(console, f"The settings that were chosen: coterie run {shlex.quote(str(path / f'{tuning.best}.toml'))}")
