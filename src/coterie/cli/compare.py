"""`coterie compare`: run several methods and seeds on the same splits, or compare finished runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.console import say, show, stdout
from coterie.cli.errors import report_errors, with_problems
from coterie.cli.flags import with_settings
from coterie.cli.progress import watch
from coterie.cli.request import Request
from coterie.cli.run import Quiet, describe, measures, schema_lines
from coterie.cli.tables import print_comparison
from coterie.cli.tune_tables import chosen_table, importance_lines, plan_lines
from coterie.core.errors import ConfigError
from coterie.experiment.resolve import default_out
from coterie.experiment.several.compare import run_trials
from coterie.experiment.several.compare_runs import compare_runs
from coterie.experiment.several.trials import prepare_trials
from coterie.experiment.tuning.tune import TUNING, first_seed, given_names, run_tuning, searches_of, tuned

METHODS = "local,fedavg,fedmap"
SEEDS = "3"


@with_settings("method", "reference")
def compare(
    ctx: typer.Context,
    *,
    methods: Annotated[
        str | None,
        typer.Option(help=f"names of the methods, separated by commas (default: {METHODS})", metavar="NAMES"),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help=f"number of seeds, counting from --seed, or a list separated by commas (default: {SEEDS})",
            metavar="INTEGER",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="folder for all runs; runs that are already there are not repeated (default: a new one in runs/)",
            metavar="FOLDER",
        ),
    ] = None,
    tune: Annotated[
        int | None,
        typer.Option(
            help="first search the settings of each method, and of local, with so many candidates each, on the "
            "validation data of the first seed; all seeds then have its splits",
            min=1,
        ),
    ] = None,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Run several methods over several seeds on the same splits, or compare finished runs.

    For the same seed, all methods share the splits, the initial model and the participants. Include local to see what
    each method gains over training alone.

    All settings of 'coterie run' work here, also in FILE.toml. Each method takes the flags that it has.

    'coterie compare RUN RUN ...' compares finished runs on the same data, from their folders. Nothing is trained.
    """
    with report_errors() as stopped:
        if ctx.args and Path(ctx.args[0]).is_dir():
            given = [
                key
                for key, value in {**settings, "methods": methods, "seeds": seeds, "out": out, "tune": tune}.items()
                if value
            ]
            if given or any(word.startswith("-") for word in ctx.args):
                raise ConfigError(["to compare finished runs, give only their folders: settings do not apply"])
            print_comparison(stdout(), compare_runs(ctx.args), quiet=quiet)
            return
        request = Request(ctx, settings)
        # A file for `coterie run` works here too, as does a setting that names a method.
        file_method = request.method() if {"method", "setting"} & request.values.keys() else None
        request.take("method", None)
        request.take("reference", None)
        names = names_of(methods or request.take("methods", f"local,{file_method}" if file_method else METHODS))
        numbers = _numbers(seeds or request.take("seeds", SEEDS), request.problems)
        request.add_method_flags(names)
        if tune is not None:
            names = names if "local" in names else ["local", *names]
            request.values.setdefault("split_seed", first_seed(numbers, request.values.get("seed")))
        trials = with_problems(request.problems, lambda: prepare_trials(names, numbers, **request.values))
        stopped.debug = trials.first.config.debug
        searches = None if tune is None else searches_of(trials, tune, {}, given_names(request.values))
        path = out or default_out(trials.first.config.model_copy(update={"method": "compare"}))
        stopped.advice = f"To continue, run the same command with --out {shlex.quote(str(path))}"
        console = stdout()
        if not quiet:
            which = f"seed{'s' * (len(trials.seeds) > 1)} {', '.join(map(str, trials.seeds))}"
            say(console, f"{', '.join(trials.methods)} on {describe(trials.first)}, {which}")
            for line in schema_lines(trials.first.federation):
                say(console, line)
            for line in plan_lines(searches) if searches else ():
                say(console, line)
        with watch(quiet, measures=measures(trials.first.config), debug=trials.first.config.debug) as progress:
            if searches:
                tuning = run_tuning(searches, path / TUNING, progress=progress, test=False)
                trials = tuned(trials, tuning)
            comparison = run_trials(trials, path, progress=progress)
        if searches:
            show(console, chosen_table(tuning))
            for line in importance_lines(tuning) if not quiet else ():
                say(console, line)
        print_comparison(console, comparison, quiet=quiet)


def names_of(given: Any) -> list[str]:
    """Return names that are given as a list, or as text with commas."""
    return [str(name).strip() for name in (given.split(",") if isinstance(given, str) else given)]


def _numbers(given: Any, problems: list[str]) -> int | list[int]:
    """Return the number of seeds, or the list of them."""
    try:
        if isinstance(given, str) and "," not in given:
            return int(given)
        return given if isinstance(given, int) else [int(part) for part in names_of(given) if part]
    except (TypeError, ValueError):
        problems.append(f"seeds = {given!r}: give a number of seeds, such as 3, or a list, such as 0,1,2")
        return 1
