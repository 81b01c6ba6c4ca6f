"""Warnings about a run in which something can do nothing. Each says what is so, and then what to do."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.core.errors import CoterieError
from coterie.core.method import Population
from coterie.engine.peers import Peers
from coterie.experiment.plan_costs import server_for
from coterie.experiment.probe import Pull
from coterie.experiment.setup import Setup

INERT = 1e-3  # a pull of this share of the data's gradient does nothing that can be seen
HELD = 0.25  # a model that moves this share of the way that training alone takes it is held where it is
BINDS = 0.5  # by a pull that leaves no more than this of a model's movement
CERTAIN = 0.999  # a weight that leaves nothing for others
CLUSTERING = ("clustered-fl", "ifca")  # which begin with equal weights, and part later
ALIKE = 0.01  # weights that differ by this share of their mean are equal


def certain(setup: Setup, times: list[int] | None) -> list[str]:
    """Return the warnings that follow from the settings alone."""
    config, size = setup.config, len(setup.federation.names)
    if config.method == "local":
        return []
    participants = config.participants(size)
    heard = min(participants, config.clients_heard or participants)
    found = cautions_of(setup)
    if size == 1:
        found.append("there is only one client, so it hears nobody: give the data of more clients")
    if times is not None and (never := times.count(0)):
        found.append(
            f"{never} of {size} clients take part in no round and learn nothing: raise rounds, fraction or "
            "clients_per_round"
        )
    if isinstance(setup.peers, Peers):
        if (parts := _components(setup.peers)) > 1:
            found.append(
                f"the graph of peers has {parts} parts, which never hear of each other: add edges between them"
            )
    elif heard == 1 < size and not _keeps_models(setup):
        key = "clients_heard" if participants > 1 else "clients_per_round"
        found.append(f"only one client is heard in a round, so there is nothing to combine: raise {key} (or fraction)")
    return found


def cautions_of(setup: Setup) -> list[str]:
    """Return what the method itself finds wrong with the model and the number of clients."""
    size = len(setup.federation.names)
    return setup.method.cautions(setup.task, Population(size, setup.config.participants(size), setup.task))


def diverged(setup: Setup, error: CoterieError) -> str:
    """Warn that the probe did not get through its two rounds."""
    words = str(error).removesuffix(".").replace("; the checkpoints before this round are kept", "")
    return f"{words}, or {_change(setup, more=False)}" if setup.method.pull_option else words


def _keeps_models(setup: Setup) -> bool:
    """Return whether the server remembers clients of earlier rounds, so that it combines even what one client says."""
    return "collaboration" in setup.method.server_info(server_for(setup, 2))


def _components(peers: Peers) -> int:
    group = list(range(len(peers.near)))
    for _ in peers.near:
        new = [min(group[j] for j in near) for near in peers.near]
        if new == group:
            break
        group = new
    return len(set(group))


def inert(setup: Setup, pull: Pull | None, steps: dict[str, int]) -> list[str]:
    """Warn of a pull that does nothing."""
    if pull is None or pull.reach >= INERT or cautions_of(setup):
        return []
    stronger = _change(setup, more=True)
    if pull.strength == 0:
        one = steps["most"] == 1
        why = ", since one step a round begins where there is none" if one else ""
        remedy = "take more local steps" if one else f"choose {stronger}"
        return [f"the pull of {setup.config.method} is 0 but for rounding{why}: {remedy}"]
    return [
        f"the pull of {setup.config.method} is {pull.strength:.1g} of the data's gradient over a round, so it does "
        f"next to nothing: choose {stronger}"
    ]


def held(setup: Setup, pull: Pull | None, progress: float | None) -> list[str]:
    """Warn of a pull that holds the model where it is."""
    if pull is None or pull.movement is None or pull.movement > BINDS:
        return []
    moved = pull.movement if progress is None else progress
    if moved >= HELD:
        return []
    return [
        f"the pull of {setup.config.method} holds a client's model where it is: a round moves it {moved:.1%} as far as "
        f"training alone would: choose {_change(setup, more=False)}, or larger steps of the model that it is pulled to"
    ]


def _change(setup: Setup, *, more: bool) -> str:
    option = setup.method.pull_option
    name = option.removeprefix("1/")
    now = getattr(setup.method, name, None)
    larger = more is not option.startswith("1/")
    return f"a {'larger' if larger else 'smaller'} {name}" + (f" than {now:g}" if isinstance(now, int | float) else "")


def one_sided(setup: Setup, collaboration: Tensor | None, weight: Tensor | None, names: tuple[str, ...]) -> list[str]:
    """Warn of weights between clients, or of clients in what they share, that leave nothing to learn."""
    name, found = setup.config.method, []
    look = f"'coterie methods {name}' lists the options that decide this"
    if collaboration is not None and len(collaboration) > 1:
        own = collaboration.diagonal()
        if float(own.median()) >= CERTAIN:
            found.append(f"a client weighs {float(own.median()):.4f} for itself, so it learns from nobody: {look}")
        elif float(collaboration.amax(1).median()) >= CERTAIN:
            found.append(f"clients' weights are one-hot: each hears a single client, and that one's model only: {look}")
        elif _alike(collaboration) and setup.config.method not in CLUSTERING:
            found.append(f"every client weighs all that it hears alike, so {name} makes one mean of them: {look}")
    if weight is not None and len(weight) > 1 and weight.ndim == 1 and float(weight.max()) >= CERTAIN:
        found.append(
            f"client '{names[int(weight.argmax())]}' weighs {float(weight.max()):.4f} in what is shared, and nobody "
            f"else is heard: choose another weighting ({look})"
        )
    return found


def _alike(collaboration: Tensor) -> bool:
    """Return whether in every row all weights but zeros are equal, and more than two."""
    heard = collaboration > 0
    number = heard.sum(1, keepdim=True)
    apart = torch.where(heard, collaboration * number - 1, 0.0).abs()
    return int(number.min()) > 2 and float(apart.max()) <= ALIKE
