"""Writes a site's results to its own folder: a run folder of one client, with its model, card and report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coterie.core import tree
from coterie.deploy import outcome
from coterie.deploy.refused import Refused
from coterie.deploy.store import Store
from coterie.deploy.work import Workbench
from coterie.evaluation.scoring import default_metric
from coterie.experiment.conclude import write_tables
from coterie.experiment.result import Result
from coterie.experiment.setup import Setup
from coterie.experiment.stopping import EARLY, Stop


def write(name: str, workbench: Workbench, store: Store, selected: int, selected_alone: int, rounds: int) -> Path:
    """Write STORE/result with the model of the selected round, or of the last evaluated round before it."""
    planned, method = workbench.config.rounds, workbench.config.method
    stopped = Stop(rounds, planned, EARLY, "the server judged all sites' scores") if rounds < planned else None
    params = workbench.task.init()
    form = {
        "client": tree.broadcast(workbench.method.init_client(params), 1),
        "deploy": workbench.message_form(train=False, deploy=True)["deploy"],
    }
    found = store.candidate("candidate", selected, form)
    if found is None:
        raise Refused("state-lost", f"site '{name}' has not evaluated any round up to {selected}: it has no model")
    round, content = found
    metric = workbench.config.select or default_metric(workbench.task.target)
    config = workbench.config.model_copy(update={"select": metric})
    budget = workbench.privacy.budget
    setup = Setup(config, workbench.method, workbench.federation, workbench.task, metric, budget=budget)
    history, out, reference = store.read("history.json", []), store.path / "result", None
    alone = store.candidate("alone", selected_alone, {"alone": tree.broadcast(params, 1)}) if workbench.local else None
    if workbench.local is not None and alone is not None:
        results = workbench.results_alone(alone[0], alone[1]["alone"])
        own = setup.with_method(workbench.local)
        ended = None if stopped is None else stopped.of_reference(method)
        records = _records(setup, name, history, "alone")
        reference = _conclude(own, workbench, out / "reference", records, alone[0], results, stopped=ended)
        write_tables(reference, out / "reference")
    results = workbench.results(round, content["client"], content["deploy"])
    result = _conclude(setup, workbench, out, _records(setup, name, history, "own"), round, results, reference, stopped)
    outcome.complete(result, setup, out, workbench.facts.size)
    return out


def _conclude(
    setup: Setup,
    workbench: Workbench,
    out: Path,
    records: Any,
    round: int,
    results: outcome.SiteResults,
    beside: Any = None,
    stopped: Stop | None = None,
) -> Result:
    return outcome.conclude(setup, out, records, round, results, beside, workbench.facts.size, stopped)


def _records(setup: Setup, name: str, history: list[dict[str, Any]], who: str) -> list[outcome.Record]:
    about = {"participants": [name], "info": {}, "server": {}, "bytes_up": 0, "bytes_down": 0, "seconds": 0.0}
    return [{"round": row["round"], **about, **outcome.scores(setup, [row[who]])} for row in history]
