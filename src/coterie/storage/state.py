"""The state of a run: what changes from round to round, and is therefore in a checkpoint."""

from __future__ import annotations

from typing import Any, NamedTuple

from coterie.core.tree import Tree


class State(NamedTuple):
    """The server's state and the clients' states: one tree, so that a checkpoint is one file."""

    server: Tree  # among peers: leaves [clients, ...], one copy each
    clients: Any  # leaves [clients, ...]; or `coterie.core.client_rows.ClientRows`
