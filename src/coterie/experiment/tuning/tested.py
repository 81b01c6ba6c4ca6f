"""Run what a search chose, on all examples: the only time that test examples are looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.experiment import stopping
from coterie.experiment.progress import Progress
from coterie.experiment.run import run_setup
from coterie.experiment.several.compare_runs import compare_runs
from coterie.experiment.several.comparison import Comparison
from coterie.experiment.tuning.evidence import LOCAL
from coterie.storage.run_folder import COMPLETE, safe_name

if TYPE_CHECKING:
    from coterie.experiment.tuning.tune import Searches


def tested(searches: Searches, path: Path, labels: Sequence[str], tell: Progress) -> Comparison:
    """Run what was chosen on all examples; runs that are complete already are read.

    Training alone comes last: beside a method that stopped early it has as many rounds. What clients take home is left
    to the runs that follow, since the two models of a client may be of different networks here.
    """
    folders, until = [], None
    for label in sorted(labels, key=lambda label: label == LOCAL):
        folder = path / "chosen" / safe_name(label)
        folders.append(folder)
        if not all((folder / name).exists() for name in COMPLETE):
            setup = searches.chosen(label)
            setup = dataclasses.replace(setup, config=setup.config.model_copy(update={"take_home": "federated"}))
            if label == LOCAL and len(labels) > 1:
                setup = setup.without_stopping()
            begun = (folder / "config.toml").exists()
            run_setup(setup, folder, progress=tell, resuming=begun, report=False, until=until)
        stop = stopping.read(folder)
        until = None if stop is None else stop.of_reference(label)
    return compare_runs(folders)
