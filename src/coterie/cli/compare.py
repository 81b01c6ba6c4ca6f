"""`coterie compare`: several methods, several seeds, the same splits."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.asked import Asked
from coterie.cli.console import say, stdout
from coterie.cli.errors import checked, in_words
from coterie.cli.flags import with_settings
from coterie.cli.progress import watch
from coterie.cli.run import Quiet, agreed, describe, measures
from coterie.cli.tables import print_comparison
from coterie.errors import ConfigError
from coterie.experiment.compare import prepare_trials, run_trials
from coterie.experiment.config import default_out
from coterie.experiment.finished import compare_runs

METHODS = "local,fedavg,fedmap"
SEEDS = "3"


@with_settings("method", "reference")
def compare(
    ctx: typer.Context,
    *,
    methods: Annotated[
        str | None,
        typer.Option(help=f"their names, with commas (default: {METHODS})", metavar="NAMES"),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help=f"how many seeds, counting from --seed, or which, with commas (default: {SEEDS})",
            metavar="INTEGER",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="the folder of all runs; what it holds already is not run again (default: a new one in runs/)",
            metavar="FOLDER",
        ),
    ] = None,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Run several methods over several seeds on the same splits, or compare finished runs.

    With one seed, all methods have the same splits, initial model and participants. Include local to see what each
    gains over training alone.

    All settings of 'coterie run' work here, in FILE.toml too. A method's own flags go to the methods that have them.

    'coterie compare RUN RUN ...' compares the folders of finished runs of the same data; nothing is trained.
    """
    with in_words() as ending:
        if ctx.args and Path(ctx.args[0]).is_dir():
            given = [
                key for key, value in {**settings, "methods": methods, "seeds": seeds, "out": out}.items() if value
            ]
            if given or any(word.startswith("-") for word in ctx.args):
                raise ConfigError(["finished runs are compared as they are: give their folders and no settings"])
            print_comparison(stdout(), compare_runs(ctx.args), quiet=quiet)
            return
        asked = Asked(ctx, settings)
        # A file for `coterie run` serves here too, and a setting with its method.
        file_method = asked.method() if {"method", "setting"} & asked.values.keys() else None
        asked.take("method", None)
        asked.take("reference", None)
        names = _names(methods or asked.take("methods", f"local,{file_method}" if file_method else METHODS))
        numbers = _numbers(seeds or asked.take("seeds", SEEDS), asked.problems)
        asked.add_own(names)
        trials = checked(asked.problems, lambda: prepare_trials(names, numbers, **asked.values))
        path = out or default_out(trials.first.config.model_copy(update={"method": "compare"}))
        ending.advice = f"Go on with the same command and --out {shlex.quote(str(path))}"
        console = stdout()
        if not quiet:
            which = f"seed{'s' * (len(trials.seeds) > 1)} {', '.join(map(str, trials.seeds))}"
            say(console, f"{', '.join(trials.methods)} on {describe(trials.first)}, {which}")
            for line in agreed(trials.first.federation):
                say(console, line)
        with watch(quiet, measures=measures(trials.first.config)) as progress:
            comparison = run_trials(trials, path, progress=progress)
        print_comparison(console, comparison, quiet=quiet)


def _names(given: Any) -> list[str]:
    return [str(name).strip() for name in (given.split(",") if isinstance(given, str) else given)]


def _numbers(given: Any, problems: list[str]) -> int | list[int]:
    """How many seeds, or which."""
    try:
        if isinstance(given, str) and "," not in given:
            return int(given)
        return given if isinstance(given, int) else [int(part) for part in _names(given) if part]
    except (TypeError, ValueError):
        problems.append(f"seeds = {given!r}: give a number of seeds, such as 3, or a list, such as 0,1,2")
        return 1
