"""What methods have in common whose clients share some layers, averaged, and keep the others: the client's functions.

    s_i, o_i <- SGD on f_i(s_i, o_i), from (s, o_i)        (`local_update`); s_i is sent, and o_i is kept
    deployed:   (s, o_i)                                   (`personalize`)

Which layers are shared, s, is what the server holds (see `averaging.init_body`). A method takes these functions as they
are, as in `coterie.parts.averaging`.
"""

from __future__ import annotations

from typing import Any

from coterie.core.batches import Batches
from coterie.core.method import CountedParams, Info
from coterie.core.task import Task
from coterie.core.training import train
from coterie.core.tree import Params


def init_client(self: Any, params: Params) -> Params:
    """Return the initial model; only the layers that are not shared are ever used."""
    return params


def local_update(
    self: Any, task: Task, client: Params, down: Params, batches: Batches
) -> tuple[Params, CountedParams, Info]:
    """Train shared and own layers together, and send the shared ones."""
    theta, loss = train(task, self.optimizer, {**client, **down}, batches)
    return theta, CountedParams(task.sent({name: theta[name] for name in down}), batches.count), {"loss": loss}


def personalize(self: Any, task: Task, client: Params, down: Params, batches: Batches) -> Params:
    """Return the shared layers as received, with the client's own others."""
    return {**client, **down}
