"""Make a run private, as its configuration asks: the one door from settings to what is protected."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from coterie.core.errors import ConfigError
from coterie.core.privacy import Private
from coterie.core.task import Task
from coterie.data.federation import Federation
from coterie.data.minibatches import Plan
from coterie.engine.samplers import Turnout, Uniform
from coterie.experiment.privacy import budget, refusals
from coterie.experiment.privacy.budget import Budget, Wanted
from coterie.experiment.privacy.releases import message_of
from coterie.experiment.privacy.site_level import Shares
from coterie.methods.fields import AnyMethod, with_optimizer

KEYS = ("epsilon", "noise")  # either of them asks for privacy
DETAILS = ("clip", "clip_features", "clip_loss", "delta")
SETTINGS = ("privacy", *KEYS, *DETAILS)
MAX_SAMPLED = 2_000_000  # clients times rounds for which participation is worked out


class Installed(NamedTuple):
    """A method as a private run calls it, how messages are changed, and what it costs."""

    method: AnyMethod
    shares: Shares | None = None
    budget: Budget | None = None


def problems_of(config: Any) -> list[str]:
    """Say what is wrong with the settings of privacy, before there are data."""
    wanted = config.privacy is not None
    found = []
    if not wanted:
        fields = type(config).model_fields
        given = [key for key in (*KEYS, *DETAILS) if getattr(config, key) != fields[key].default]
        if given:
            found.append(
                f"{', '.join(given)}: for privacy: say which by privacy = 'record', 'site-local' or 'site-central'"
            )
        return found
    if config.epsilon is None and config.noise is None:
        found.append(f"privacy = '{config.privacy}': say how much, by epsilon = 4, or by the noise")
    if config.privacy == "record" and config.class_weights:
        found.append(
            "class_weights: they tell how many examples a client has of each class: leave them out with privacy"
        )
    if config.privacy == "site-central" and config.clients_heard is not None:
        found.append(
            "clients_heard: with privacy = 'site-central', all who take part are averaged: use clients_per_round"
        )
    if config.privacy == "site-central" and config.topology != "server":
        found.append("privacy = 'site-central': among peers there is no server that could add the noise: 'site-local'")
    return found


def install(
    config: Any,
    method: AnyMethod,
    task: Task,
    federation: Federation,
    rounds: Sequence[int],
    plan: Plan | None = None,
) -> Installed:
    """Make a method private as `config` asks; return it as it is if nothing is asked for, or nothing is sent.

    Args:
        config: the run's `Config`.
        method: the method, scheduled.
        task: the model and its loss.
        federation: the clients.
        rounds: in how many rounds each client takes part, at most.
        plan: the minibatches of a round; by default the configuration's.

    Raises:
        ConfigError: the method cannot be private, or not at this epsilon.
    """
    if config.privacy is None or config.method == "local":
        return Installed(method)
    wanted = Wanted(config.privacy, **{key: getattr(config, key) for key in (*KEYS, *DETAILS)})
    plan = plan or config.plan()
    if problems := refusals.of_model(task, wanted.level):
        raise ConfigError(problems)
    if wanted.level == "record":
        made, found = budget.for_records(wanted, method, config.method, task, federation, plan, rounds)
        return Installed(made, None, found)
    if problems := refusals.of_messages(config.method, wanted.level):
        raise ConfigError(problems)
    up = message_of(method, task, federation, plan, 0, len(federation.names))
    taking_part = dict(zip(federation.names, rounds, strict=True))
    # A sample makes the budget smaller if everybody has the same chance to be in it.
    uniform = config.sampler is None or isinstance(config.sampler, Uniform)
    participants = config.participants(len(federation.names)) if uniform else len(federation.names)
    shares, found = budget.for_sites(wanted, method, config.method, up, taking_part, participants, config.rounds)
    return Installed(method, shares, found)


def at_site(config: Any, method: AnyMethod, task: Task, own: Federation, plan: Plan) -> Installed:
    """Make a method private at a site on its own machine, which finds the noise for its own number of examples.

    Noise is from the operating system: nobody can foretell it, or draw it again. The server may ask for the site in
    every round, so all rounds count.
    """
    made = install(config, method, task, own, [config.rounds], plan)
    optimizer, shares = getattr(made.method, "optimizer", None), made.shares
    method = made.method
    if isinstance(optimizer, Private):
        guard = dataclasses.replace(optimizer.own_guard, entropy="system")
        method = with_optimizer(method, Private(optimizer.inner, guard))
    if shares is not None:  # centrally, the server adds the noise
        shares = dataclasses.replace(shares, entropy="system", clips_only=shares.level == "site-central")
    return Installed(method, shares, made.budget)


def at_server(config: Any, method: AnyMethod, task: Task, federation: Federation, plan: Plan) -> Installed:
    """Return what a server on its own machine does to the messages of sites, if anything, and what sites spend."""
    names = federation.names
    made = install(config, method, task, federation, [config.rounds] * len(names), plan)
    shares, found = made.shares, made.budget
    if found is not None and found.level == "record" and config.epsilon is not None and config.noise is None:
        found = dataclasses.replace(found, epsilons=dict.fromkeys(names, config.epsilon))  # each finds its own noise
    central = shares is not None and shares.level == "site-central"
    return Installed(method, dataclasses.replace(shares, entropy="system") if shares and central else None, found)


def rounds_of_each(config: Any, federation: Federation) -> list[int]:
    """Return in how many rounds each client takes part, which the run's seed and its sampler decide.

    Where that is long to find out, it is all rounds.
    """
    names, sizes = federation.names, federation.sizes
    participants = config.participants(len(names))
    if (participants >= len(names) and config.sampler is None) or config.rounds * len(names) > MAX_SAMPLED:
        return [config.rounds] * len(names)
    times, turnout = [0] * len(names), Turnout(config.sampler, names, sizes, participants, config.seed)
    for round in range(1, config.rounds + 1):
        for client in turnout.of(round):
            times[client] += 1
    return times
