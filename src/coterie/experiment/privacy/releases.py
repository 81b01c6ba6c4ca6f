"""What a client releases in a round: found by letting the method work through it without computing anything.

Every pass over minibatches is a scan. Here, a back-end takes one step of each, to hear what it releases, and gives the
carry back as it was. So the accountant counts what a method does, and not what somebody wrote down about it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie.core import routes, tree
from coterie.core.backend import current, using
from coterie.core.batches import Batches
from coterie.core.errors import ConfigError
from coterie.core.method import Population
from coterie.core.plain import Plain
from coterie.core.privacy import GRADIENT, SUM, listening
from coterie.core.task import Task
from coterie.data.federation import Federation
from coterie.data.minibatches import Plan, draw
from coterie.methods.fields import AnyMethod

if TYPE_CHECKING:
    from coterie.core.scan import Program

Counts = dict[int, int]  # {private gradients on one minibatch: such minibatches}


class Counting:
    """A back-end that takes one step of a scan, and notes what all of them would release."""

    def __init__(self) -> None:
        self.gradients: Counter[int] = Counter()  # by the key of the minibatch
        self.seen: set[tuple[int, int]] = set()

    def scan(
        self, program: Program, carry: list[Tensor], fixed: list[Tensor], time: tuple[Tensor, ...]
    ) -> list[Tensor]:
        index, mask, key, *pace = time
        keys = key[mask.any(-1)].tolist()
        *aux, x, y = fixed
        with listening() as told:
            program.function(False)(
                *carry, *aux, x[index[0]], y[index[0]], mask[0], key[0], *(each[0] for each in pace)
            )
        stamps = {each.stamp for each in told}
        for drawn in [*keys] if stamps else []:
            self.gradients[drawn] += sum(each.what == GRADIENT for each in told)
        uses = {(drawn, stamp) for drawn in keys for stamp in stamps}
        if self.seen & uses:
            raise ConfigError(
                ["privacy: this method trains the same parameters twice on the same minibatches, with the same noise"]
            )
        self.seen |= uses
        return [value.clone() for value in carry]


def count_releases(
    method: AnyMethod, task: Task, federation: Federation, plan: Plan, client: int, clients: int
) -> tuple[Counts, int]:
    """Count what one client releases in a round.

    Args:
        method: with a private optimiser.
        task: the model and its loss.
        federation: the data, of which shapes matter.
        plan: the minibatches of a client's local update.
        client: its number.
        clients: how many take part in the run, which may be more than the federation has.

    Returns:
        How many minibatches have how many private gradients; and how many other sums are released.
    """
    counting = Counting()
    with using(counting), listening() as told:
        message_of(method, task, federation, plan, client, clients)
    sums = [each.stamp for each in told if each.what == SUM]
    assert len({*sums}) == len(sums), "two sums with the same noise"
    return dict(Counter(counting.gradients.values())), len(sums)


def message_of(method: AnyMethod, task: Task, federation: Federation, plan: Plan, client: int, clients: int) -> Any:
    """Return a message of one client before it has learned anything; for the arguments, see `count_releases`."""
    params = task.init()
    people = Population(clients, clients, task, torch.arange(clients))
    server = method.init_server(params, people)
    down = tree.rows(method.dispatch(server, torch.tensor([0]), torch.Generator().manual_seed(0)), 0)
    drawn: Any = draw(federation, [client], plan, seed=0, purpose="count", round=0)
    batches = Batches(drawn.x, drawn.y, *tree.rows(drawn[2:], 0))
    if routes.asked(down) is not None:
        raise ConfigError(
            ["privacy: in this method, clients ask each other for models, which tells whose data are alike"]
        )
    with using(Counting()) if isinstance(current(), Plain) else contextlib.nullcontext():
        return method.local_update(task, method.init_client(params), down, batches)[1]
