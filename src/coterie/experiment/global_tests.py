"""Run pFedBreD's two tests: of a model on all clients' test examples together, and on each client's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from coterie.core import rng, tree
from coterie.core.device import on
from coterie.core.tree import Params, Tree
from coterie.data.federation import Index
from coterie.engine import Central, ClientRunner, in_order
from coterie.engine.engine import one_thread
from coterie.evaluation import Scores, score
from coterie.evaluation.metrics import mean
from coterie.experiment.scored_examples import Pool, examples_at_once
from coterie.experiment.simulation import Simulation
from coterie.profiling import timed

MAX_POOLED_PREDICTIONS = 10_000_000  # in a global test: examples times the clients' models that predict them
POOLED_OUTPUTS_AT_ONCE = 500_000  # of these predictions, how many are in memory at once


@timed("evaluate")
def both_tests(sim: Simulation, round: int, engine: ClientRunner) -> dict[str, Any]:
    """Run both tests, if the method has a model for everybody (G) beside the clients' own (P).

    The global test measures a model on the pooled test examples of all clients; for P, it averages over clients.
    The local test measures it on each client's own test examples, and averages by their number. If the global test
    would take more than `MAX_POOLED_PREDICTIONS`, the pool is a random part of the test examples.

    Args:
        sim: a simulation after some rounds.
        round: the number of the last one.
        engine: computes what is not computed on the spot.

    Returns:
        {"examples": size of the pool, "G": {"global": metrics, "local": metrics}, "P": the same}; {} without a G.
    """
    shared = sim.shared_model()
    if shared is None:
        return {}
    everyone = list(range(len(sim.federation.names)))
    own = [sim.federation.split(i).test for i in everyone]
    sizes = [float(len(each)) for each in own]
    pool = np.concatenate(own)
    if len(pool) * len(everyone) > MAX_POOLED_PREDICTIONS:
        number = max(1, MAX_POOLED_PREDICTIONS // len(everyone))
        pool = np.sort(rng.generator(sim.seed, "global test").choice(pool, number, replace=False))
    scores = sim.evaluate(round, engine)
    local = {"G": scores["global_test"], "P": scores["test"]}
    copies = everyone[:1] if isinstance(sim.place, Central) else everyone  # one server has one G
    found = _inline(sim, round, shared, copies, pool) or _by_engine(sim, round, engine, shared, copies, pool)
    tests: dict[str, Any] = {"examples": len(pool)}
    for which, pooled in found.items():
        tests[which] = {
            "global": {metric: mean(values) for metric, values in pooled.items()},
            "local": {metric: mean(values, sizes) for metric, values in local[which].items()},
        }
    return tests


def _inline(sim: Simulation, round: int, shared: Params, copies: list[int], pool: Index) -> dict[str, Scores]:
    """Return the metrics of every P and G on all of `pool`, or {} if models have to be made or kept elsewhere."""
    examples = Pool(sim.federation, sim.task, pool)
    if not (examples.fits(len(sim.federation.names)) and sim.views_are_at_hand()):
        return {}
    width = examples_at_once(sim.federation.x)
    with one_thread(), on(sim.federation.x.device):
        views = sim.views_at_hand(round)
        rows = [tree.rows(shared, i) for i in copies]
        return {
            "G": examples.score(len(copies), lambda task, i, x: task.logits(rows[i], x), width),
            "P": examples.score(len(views), lambda task, i, x: sim.method.predict(task, views[i], x), width),
        }


def _by_engine(
    sim: Simulation, round: int, engine: ClientRunner, shared: Params, copies: list[int], pool: Index
) -> dict[str, Scores]:
    """Do the same with the engine, a few clients at a time."""
    found: dict[str, list[Scores]] = {"G": [], "P": []}
    number = len(sim.federation.names)
    step = max(1, POOLED_OUTPUTS_AT_ONCE // len(pool))
    for ids in (list(range(start, min(start + step, number))) for start in range(0, number, step)):
        found["P"].append(_scores(sim, sim.own_results(round, engine, ids, pool), ids, pool))
        if some := [i for i in ids if i in copies]:
            found["G"].append(_scores(sim, sim.shared_results(round, engine, shared, some, pool), some, pool))
    return {
        which: {metric: np.concatenate([part[metric] for part in parts]) for metric in parts[0]}
        for which, parts in found.items()
    }


def _scores(sim: Simulation, results: list[tuple[list[int], Tree]], ids: list[int], pool: Index) -> Scores:
    """Return the metrics of the models of `ids`, each on all of `pool`."""
    (outputs,) = in_order(results, ids)
    y = sim.federation.y[torch.from_numpy(pool)]
    owner = torch.arange(len(ids)).repeat_interleave(len(pool))
    return score(sim.task, outputs.flatten(0, 1), y.repeat(len(ids), *[1] * (y.ndim - 1)), owner, len(ids))
