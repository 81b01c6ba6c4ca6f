"""Runs a federation round by round for figures that need what a run does not record: models, messages, weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from coterie.compute.availability import unavailable
from coterie.core.tree import Tree
from coterie.engine import Engine
from coterie.experiment.setup import Setup, prepare
from coterie.experiment.simulation import Simulation

Seen = Callable[[int, Simulation], None]  # after a round: its number, the federation
Heard = Callable[[int, Tree, Tree], None]  # in a round: its number, what clients were sent, what they send


def watch_rounds(
    method: str, settings: Mapping[str, Any], *, seen: Seen | None = None, heard: Heard | None = None
) -> tuple[Setup, Simulation, Engine]:
    """Train for all rounds, and show each to `seen` and `heard`.

    Returns:
        The setup, the federation after the last round, and the engine.
    """
    setup = prepare(method, **{**settings, "reference": False})
    config = setup.config
    sim = Simulation.start(
        *(setup.method, setup.task, setup.federation, config.plan()),
        *(config.participants(len(setup.federation.names)), config.seed),
    )
    sim.heard = config.clients_heard
    if heard is not None:

        def listen(round: int, ids: list[int], down: Tree, ups: Tree) -> Tree:
            heard(round, down, ups)
            return ups

        sim.tamper = listen
    compiled = not unavailable() if config.compile is None else config.compile
    engine = Engine("stacked" if config.engine == "auto" else config.engine, compiled)
    for number in range(1, config.rounds + 1):
        sim.train(number, engine)
        if seen is not None:
            seen(number, sim)
    return setup, sim, engine
