"""Builds what a server needs for rounds, of what the sites declared: a federation without data, model and state."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from coterie.core import rng, routes, tree
from coterie.core.errors import ConfigError
from coterie.core.method import Population
from coterie.core.tree import Tree
from coterie.deploy.federation_facts import (
    build_task,
    federation_without_data,
    frozen_in_short,
    gather_facts,
    message_forms,
)
from coterie.deploy.intake import Forms
from coterie.deploy.joining import Joining
from coterie.deploy.ledger import Ledger
from coterie.deploy.messenger import Messenger
from coterie.deploy.round_records import RoundRecords
from coterie.deploy.round_requests import RoundRequests
from coterie.deploy.rounds import Rounds
from coterie.deploy.schema import Part
from coterie.deploy.secure import agreement
from coterie.engine import Central, make_peers
from coterie.evaluation.scoring import default_metric
from coterie.experiment.execute import local_like
from coterie.experiment.privacy import install as privacy
from coterie.experiment.setup import Setup
from coterie.experiment.simulation import Simulation
from coterie.parts import robust
from coterie.storage.run_folder import RunFolder
from coterie.storage.state import State

if TYPE_CHECKING:
    from coterie.deploy.server import Server


def begin_rounds(server: Server, ledger: Ledger, joining: Joining, folder: RunFolder) -> Rounds:
    """Build the model and state from what the sites declared, or restore them after `ledger.round`."""
    config, method = server.config, server.method
    facts = gather_facts(config, ledger.declared)
    if facts.audience > facts.size:
        raise ConfigError([f"clients_per_round = {config.clients_per_round}, but there are {facts.size} sites"])
    federation = federation_without_data(config, ledger.declared, facts)
    task = build_task(config, server.model, facts)
    facts = facts.model_copy(update={"frozen": frozen_in_short(task)})
    peers = make_peers(config.topology, federation.names, config.seed)
    if peers is not None and not method.peer_to_peer:
        raise ConfigError([f"topology = {config.topology!r}: method {config.method} needs a server"])
    if config.robust and peers is None and facts.audience < (fewest := robust.fewest(config.robust)):
        raise ConfigError([f"robust = '{config.robust}' needs {fewest} sites in a round, not {facts.audience}"])
    metric = config.select or default_metric(facts.target)
    config = config.model_copy(update={"select": metric})
    shapes = dataclasses.replace(federation, x=facts.blank(1))
    made = privacy.at_server(config, method, task, shapes, facts.plan(config))
    setup = Setup(config, method, federation, task, metric, peers, shares=made.shares, budget=made.budget)
    keys = rng.keys_of(federation.names)
    people = Population(facts.size, facts.audience, task, keys, seed=rng.server_seed(config.seed))
    start: Tree = method.init_server(task.init(), people)
    up, info = message_forms(method, task, start, config, facts)
    secure_form = None
    if server.rules.secure:
        if problems := agreement.problems(config, method, facts.size):
            raise ConfigError(problems)
        secure_form = agreement.Form.of(method, up, facts)
        up = secure_form.masked
    alone_info: Tree = {}
    if config.reference and config.method != "local":
        alone_info = message_forms(local_like(method), task, (), config, facts)[1]
    names = federation.names
    parts: set[Part] = {"validation", "test"}
    if method.global_model(start) is not None:
        parts |= {"global_validation", "global_test"}
    near, offer = None, None
    if peers is not None:
        if routes.asked(method.dispatch(start, torch.tensor([0]), torch.Generator())) is not None:
            offer = task.sent(tree.rows(method.offer(start, torch.tensor([0])), 0))
        near = {name: tuple(names[j] for j in peers.near[i] if j != i) for i, name in enumerate(names)}
        start = ()
    state = State(start, ())
    if ledger.round:
        state = folder.load(ledger.round, state)[0]
    sim = Simulation(method, task, federation, facts.plan(config), facts.audience, config.seed, state, Central())
    sim.sampler, sim.heard = config.sampler, config.clients_heard
    records = RoundRecords.read(setup, ledger, folder, reference=bool(alone_info))
    forms = Forms(up, info, alone_info, near, frozenset(parts), offer, secure_form is not None)
    messenger = Messenger(server, ledger, joining)
    asks = RoundRequests(server, messenger, ledger, facts, setup, sim, forms)
    return Rounds(server, ledger, messenger, folder, facts, setup, sim, forms, asks, records, secure_form)
