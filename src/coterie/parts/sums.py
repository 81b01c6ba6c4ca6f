"""Which methods need only sums of messages, and a message that stands for all of a round.

Secure aggregation (`coterie.deploy.secure`) tells a server sum_i p_i w_i and sum_i p_i. Here w_i are the fields of
client i's message that reach the server's state by their weighted mean only (`Method.averaged`, as for robust
averages), and p_i is what the message weighs. The method's `aggregate` is then given the mean, once for every client:

    w = sum_i p_i w_i / sum_i p_i,     weights sum_i p_i / n                           (`alike`)

of which the weighted mean is w, with the same sum of weights. That serves a method whose messages hold nothing but
those fields and their weight, which is one of these:

    count          p_i = n_i
    log_weight     p_i = exp(log_weight), at most n_i, or 1
    no such field  p_i = 1

Anything else in a message would have to be told one by one, so that the method is refused (`why_not`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.tree import Tree
from coterie.parts.robust import AnyMethod, averaged_fields, up_type

WEIGHTS = ("count", "log_weight")
WEIGHT_ROUNDING = (
    1.02  # exp(log_weight) is rounded, and a log-weight may exceed its bound a little (`Method.implausible`)
)


def why_not(method: AnyMethod) -> str | None:
    """Say why a server of this method needs more than sums; None if it does not."""
    fields, kind = averaged_fields(method), up_type(method)
    if not fields:
        return "its server does not only average what it is sent"
    beside = [name for name in getattr(kind, "_fields", ()) if name not in (*fields, *WEIGHTS)]
    if beside:
        return f"its server reads more of a message than what it averages: {', '.join(beside)}"
    return method.beyond_sums or None


def summed(up: Any, fields: tuple[str, ...]) -> tuple[Tensor, float]:
    """Return all numbers of a client's message that are summed as one float64 vector, and what the message weighs."""
    leaves = [leaf.detach().reshape(-1).double() for leaf in tree.leaves({name: getattr(up, name) for name in fields})]
    return (torch.cat(leaves) if leaves else torch.zeros(0, dtype=torch.float64)), weight_of(up)


def weight_of(up: Any) -> float:
    """Return p_i."""
    if "log_weight" in up._fields:
        return math.exp(float(up.log_weight))
    return float(up.count) if "count" in up._fields else 1.0


def largest_weight(method: AnyMethod, form: Any, examples: int) -> float:
    """Return the most that a message of this form may weigh, of a client with so many examples."""
    return method.largest_weight(examples) * WEIGHT_ROUNDING if {*WEIGHTS} & {*form._fields} else 1.0


def alike(mean: Tensor, weight: float, clients: int, fields: tuple[str, ...], form: Any) -> Any:
    """Return the message that stands for each of the clients.

    Args:
        mean: the weighted mean of the vectors of `summed`.
        weight: the sum of the clients' weights.
        clients: how many they are.
        fields: the fields that are averaged.
        form: a message of the method, for names, shapes and types.
    """
    parts = {name: getattr(form, name) for name in fields}
    flat = tree.pack(parts)
    pieces = torch.split(mean, [leaf.numel() for leaf in flat.values()])
    new = {}
    for (path, leaf), piece in zip(flat.items(), pieces, strict=True):
        value = piece.reshape(leaf.shape)
        new[path] = (value if leaf.is_floating_point() else value.round()).to(leaf.dtype)
    each: dict[str, Tree] = tree.rebuild(new, parts)
    if "log_weight" in form._fields:
        each["log_weight"] = torch.full_like(form.log_weight, math.log(weight / clients))
    if "count" in form._fields and isinstance(form.count, Tensor):
        each["count"] = torch.full_like(form.count, weight / clients)
    return form._replace(**each)
