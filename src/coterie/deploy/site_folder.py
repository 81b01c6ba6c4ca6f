"""What a site has at the end, in its own folder: a run folder of one client, with its model, card and report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coterie import tree
from coterie.deploy import outcome
from coterie.deploy.store import Store
from coterie.deploy.work import Bench
from coterie.errors import CoterieError
from coterie.evaluation.metrics import METRICS
from coterie.experiment.result import Result
from coterie.experiment.setup import Setup


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
    metric = bench.config.select or METRICS[bench.task.kind][0]
    setup = Setup(bench.config, bench.method, bench.federation, bench.task, metric)
    history, out, reference = store.read("history.json", []), store.path / "result", None
    alone = store.candidate("alone", selected_alone, {"alone": tree.broadcast(params, 1)}) if bench.local else None
    if bench.local is not None and alone is not None:
        taken = bench.taken_alone(alone[0], alone[1]["alone"])
        own = setup.with_method(bench.local)
        reference = _conclude(own, bench, out / "reference", _records(setup, name, history, "alone"), alone[0], taken)
    taken = bench.taken(round, content["client"], content["deploy"])
    result = _conclude(setup, bench, out, _records(setup, name, history, "own"), round, taken, reference)
    outcome.complete(result, setup, out, bench.facts.size)
    return out


def _conclude(
    setup: Setup, bench: Bench, out: Path, records: Any, round: int, taken: outcome.Taken, beside: Any = None
) -> Result:
    return outcome.conclude(setup, out, records, round, taken, beside, bench.facts.size)


def _records(setup: Setup, name: str, history: list[dict[str, Any]], who: str) -> list[outcome.Record]:
    about = {"participants": [name], "info": {}, "server": {}, "bytes_up": 0, "bytes_down": 0, "seconds": 0.0}
    return [{"round": row["round"], **about, **outcome.scores(setup, [row[who]])} for row in history]
