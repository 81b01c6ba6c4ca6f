"""What a site has at the end, in its own folder: a run folder of one client, with its model and its history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coterie import tree
from coterie.deploy import outcome
from coterie.deploy.store import Store
from coterie.deploy.work import Bench
from coterie.errors import CoterieError
from coterie.evaluation.metrics import METRICS
from coterie.experiment.setup import Setup
from coterie.tree import Tree

Row = dict[str, Any]


def write(name: str, bench: Bench, store: Store, selected: int, selected_alone: int) -> Path:
    """STORE/result: the model of the selected round (or of the last one before it that this site evaluated)."""
    params = bench.task.init()
    form = {
        "client": tree.broadcast(bench.method.init_client(params), 1),
        "deploy": bench.arriving(train=False, deploy=True)["deploy"],
    }
    found = store.candidate("candidate", selected, form)
    if found is None:
        raise CoterieError(f"site '{name}' has evaluated no round up to {selected}: it has no model to deploy")
    round, content = found
    view = bench.view(round, content["client"], content["deploy"])
    history = store.read("history.json", [])
    metric = bench.config.select or METRICS[bench.task.kind][0]
    setup = Setup(bench.config, bench.method, bench.federation, bench.task, metric)
    reference = None
    out = store.path / "result"
    if bench.local is not None:
        alone = store.candidate("alone", selected_alone, {"alone": tree.broadcast(params, 1)})
        if alone is not None:
            view_alone = tree.rows(alone[1]["alone"], 0)
            local = setup.with_method(bench.local)
            reference = _conclude(local, bench, out / "reference", history, "alone", alone[0], view_alone)
    _conclude(setup, bench, out, history, "own", round, view, reference)
    return out


def _conclude(
    setup: Setup, bench: Bench, out: Path, history: list[Row], who: str, round: int, view: Tree, beside: Any = None
) -> Any:
    records = [
        {"round": row["round"], "participants": [], "info": {}, "server": {}, **outcome.scores(setup, [row[who]])}
        for row in history
    ]
    people = (bench.facts.size, bench.facts.audience)
    return outcome.conclude(setup, out, records, round, outcome.rows_of(view), beside, people)
