"""`coterie demo`: which method eight small hospitals should use, and who gains by it. It takes half a minute."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.console import say, show, stdout
from coterie.cli.errors import report_errors
from coterie.cli.progress import watch
from coterie.cli.recommend_words import look_lines, panel_table, plan_lines, sentences
from coterie.cli.run import Quiet, describe
from coterie.cli.tables import print_result
from coterie.core.toml import read_toml
from coterie.experiment.resolve import default_out
from coterie.experiment.run import run_setup
from coterie.experiment.setup import prepare
from coterie.experiment.tuning.recommend import look_at, prepare_panel, run_panel

DATA = "hospitals"
PANEL = ("local", "fedavg", "fedmap")
BUDGET: dict[str, Any] = {"model": "linear", "trials": 1, "folds": 3, "rounds": 8}
# Rounds this small are over before anything could be compiled.
QUICK: dict[str, Any] = {"engine": "stacked", "compile": False, "workers": 1}


def demo(
    seed: Annotated[int, typer.Option(help="another federation of the same kind", min=0)] = 0,
    out: Annotated[
        Path | None, typer.Option(help="folder for all that is found (default: a new one in runs/)", metavar="FOLDER")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Recommend a method for eight small generated hospitals, train it, and show who gains.

    The truth is known here: six hospitals see the same illness and have too few patients to learn it alone; one has
    another illness, and one records half of its measurements with the opposite sign.

    It is the same as 'coterie recommend' with a small panel and budget, and 'coterie run' with what was found.
    """
    with report_errors() as stopped:
        panel = prepare_panel(DATA, PANEL, seed=seed, **BUDGET, **QUICK)
        path = out or default_out(panel.setup.config.model_copy(update={"method": "demo"}))
        stopped.advice = f"To continue, run the same command with --out {shlex.quote(str(path))}"
        console = stdout()
        if not quiet:
            say(console, f"Which method for {describe(panel.setup)}, seed {seed}?")
            for line in [*look_lines(look_at(panel.setup.federation, seed)), *plan_lines(panel)]:
                say(console, line)
        with watch(quiet or not console.is_terminal, measures=False) as progress:
            found = run_panel(panel, path / "recommendation", progress=progress, report=False)
        show(console, panel_table(found))
        for line in sentences(found):
            say(console, line)
        assert found.path is not None
        if not quiet:
            say(console, "")
            say(console, f"So train it, and look at the test examples for the first time: coterie run {found.path}")
        setup = prepare(**read_toml(found.path), **QUICK)
        with watch(quiet or not console.is_terminal, measures=False) as progress:
            result = run_setup(setup, path / "run", progress=progress)
        print_result(console, result, quiet=quiet, bmta=False)
        if setup.config.report:
            say(console, f"The report: {path / 'run' / 'report.html'}")
