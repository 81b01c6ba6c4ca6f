"""A site's part in a recommendation: it trains candidates on a part of its examples, and keeps the rest to itself.

Only validation scores leave the site while candidates train. What methods predict of held-out examples stays on its
disk until it is asked how good each was: then scores, and the standard errors of their differences, are sent.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.optimizers import OPTIMIZERS
from coterie.core.tree import Tree
from coterie.data.federation import Federation
from coterie.deploy import guard, messages
from coterie.deploy.federation_facts import FederationFacts, build_task, check_facts, declare
from coterie.deploy.refused import Refused
from coterie.deploy.site_roles import RemoteServer
from coterie.deploy.store import Store
from coterie.deploy.work import LOOP, Private, Workbench, reported
from coterie.evaluation import Predictions
from coterie.evaluation.scoring import names_of
from coterie.experiment.divergence import DIVERGED
from coterie.experiment.resolve import method_of
from coterie.experiment.tuning.evidence import LOCAL, evidence_of
from coterie.experiment.tuning.folds import folds_of
from coterie.experiment.tuning.panel import together
from coterie.methods import METHODS
from coterie.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from coterie.deploy.site import Site


def try_all(site: Site, envelope: Any, message: messages.Tries, store: Store) -> tuple[messages.Tried, Tree]:
    """Do what a message asks of each candidate; return the answer, and its body."""
    if site.config.topology != "server":
        raise Refused("bad-header", "peers cannot be asked for a recommendation")
    own = fold_data(site.data, message.fold, message.folds, site.config.data_seed)
    check_facts(message.facts, declare(own))
    store.keep_trials({*message.open, *(trial.id for trial in message.trials)})
    benches = [_workbench(site, trial, message.facts, own) for trial in message.trials]
    both = list(enumerate(zip(message.trials, benches, strict=True)))
    forms = {str(i): message_form(bench, trial) for i, (trial, bench) in both}
    content = guard.open_body(
        envelope,
        {str(i): {part: bench.task.sent(each) for part, each in forms[str(i)].items()} for i, (_, bench) in both},
    )
    guard.check_finite(content)
    scores: list[dict[str, float | None] | None] = []
    body: dict[str, Tree] = {}
    failed: list[int] = []
    for i, (trial, bench) in both:
        guard.check_norm(content[str(i)], site.norm_bound)
        down = tree.filled(content[str(i)], forms[str(i)])
        part = store.trial(trial.id)
        if trial.hold:
            _hold(part, store, bench, trial, message.fold)
        private = _state(part, trial.base, bench)
        scores.append(_evaluate(part, bench, trial, private, down["deploy"]) if trial.evaluate else None)
        if trial.train:
            try:
                private, up, info, _ = bench.train(trial.step, private, RemoteServer(down["train"]))
            except CoterieError as error:
                if not str(error).startswith(DIVERGED):
                    raise
                failed.append(i)
                continue
            part.save(trial.step, private)
            body[str(i)] = {"up": up, "info": info}
    reply = messages.Tried(**site.route(message), request=message.digest, scores=tuple(scores), failed=tuple(failed))
    return reply, body


def message_form(bench: Workbench, trial: messages.Trial) -> dict[str, Tree]:
    """Return the form of what the server sends for a candidate."""
    form = bench.message_form(train=trial.train, deploy=trial.evaluate)
    form.pop("shared", None)
    return form


def judge(site: Site, message: messages.Judge, store: Store) -> messages.Judged:
    """Return how good each method was on all examples that were held out, in the folds that all methods have."""
    if message.metric not in (*names_of(message.facts.target), *(site.config.metric or ())):
        raise Refused("bad-header", "an unknown metric")
    if len(set(message.methods)) < len(message.methods) or LOCAL not in message.methods:
        raise Refused("bad-header", "methods that cannot be compared")
    check_facts(message.facts, declare(site.data))
    folders = [RunFolder(_held_out(store, k)) for k in range(1, message.folds + 1)]
    whole = [each for each in folders if all((each.path / f"{name}.safetensors").exists() for name in message.methods)]
    if not whole:
        raise Refused("state-lost", "no fold was predicted by all methods")
    held: dict[str, Predictions] = {
        name: together([each.read_predictions(name) for each in whole]) for name in message.methods
    }
    task = build_task(site.config, site.model, message.facts)
    found = evidence_of(task, message.metric, held, [site.name], seed=site.config.seed)
    rivals = [name for name in message.methods if name != LOCAL]
    return messages.Judged(
        **site.route(message),
        request=message.digest,
        examples=int(found.sizes[0]),
        scores=tuple(reported(message.metric, float(found.scores[name][0])) for name in message.methods),
        errors=tuple(_known(found.error(*pair)[0]) for pair in itertools.combinations(message.methods, 2)),
        ends=tuple((_known(found.ends[name][0, 0]), _known(found.ends[name][0, 1])) for name in rivals),
        differing=tuple(int(found.differing[name][0]) for name in rivals),
    )


def close(store: Store) -> None:
    """Delete all candidates, and all predictions of held-out examples."""
    store.keep_trials(())
    shutil.rmtree(store.path / "held-out", ignore_errors=True)


def fold_data(own: Federation, fold: int, folds: int, seed: int) -> Federation:
    """Return the site's data with a fold held out in the place of the test examples; 0: as they are."""
    if fold == 0:
        return own
    # The server knows how many examples a fold has, and not how many patients: a patient's rows may be divided here.
    made = folds_of(dataclasses.replace(own, groups=None), folds, seed)
    if not 1 <= fold <= len(made) == folds:
        raise Refused("unlike", f"fold {fold} of {folds}, but this site has {len(made)}")
    return made[fold - 1]


def _workbench(site: Site, trial: messages.Trial, facts: FederationFacts, own: Federation) -> Workbench:
    if trial.method not in METHODS:
        raise Refused("bad-header", f"there is no method '{trial.method}'")
    # What a site imports is for the site to say, not for the server: names of the library's own, or the site's.
    if (named := dict(trial.optimizer).get("name", "sgd")) not in (*OPTIMIZERS, site.config.optimizer.get("name")):
        raise Refused("bad-header", f"there is no optimizer '{named}'")
    about = {"method": trial.method, "hyper": dict(trial.hyper), "optimizer": dict(trial.optimizer), "reference": False}
    config = site.config.model_copy(update=about)
    return Workbench.build(config, method_of(config), site.model, facts, own)


def _state(part: Store, base: int, bench: Workbench) -> Private:
    """Return the candidate's state; a site that has lost it begins anew."""
    initial = bench.initial()
    try:
        return part.load(base, initial)[1]  # type: ignore[no-any-return]
    except Refused:
        return initial


def _evaluate(
    part: Store, bench: Workbench, trial: messages.Trial, private: Private, deploy: Tree
) -> dict[str, float | None]:
    """Return the scores on validation examples, and keep the model, in case its round is selected."""
    number = trial.step - 1
    sim = bench.simulation(private, RemoteServer(deploy))
    scores = sim.evaluate(number, LOOP, own_only=True)["validation"]
    if trial.keep:
        part.keep_candidate("candidate", number, {"client": private.client, "deploy": deploy}, trial.best)
    return {name: reported(name, float(values[0])) for name, values in scores.items()}


def _hold(part: Store, store: Store, bench: Workbench, trial: messages.Trial, fold: int) -> None:
    """Predict what a fold holds out with the model of round `best`, or of the last evaluated one before it."""
    deploy = bench.message_form(train=False, deploy=True)["deploy"]
    form = {"client": tree.broadcast(bench.method.init_client(bench.task.init()), 1), "deploy": deploy}
    found = part.candidate("candidate", trial.best, form)
    if found is None or fold == 0:
        raise Refused("state-lost", f"no round up to {trial.best} was evaluated")
    number, content = found
    results = bench.results(number, content["client"], content["deploy"])
    RunFolder(_held_out(store, fold)).write_predictions(results.predictions, trial.method)


def _held_out(store: Store, fold: int) -> Path:
    return store.path / "held-out" / f"fold-{fold}"


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
