"""Partitions of users and of installed packages: `my_package.parts:by_scanner:3`.

The function is called as `by_scanner(labels, clients, seed, owner, ...)`, with those of these four parameters that it
has; all others are options. `labels` are the targets of all examples and `owner` their natural owners (None where the
data has none), as arrays; `clients` is the number that was asked for (20, if none was and the parameter has no
default). It returns the positions of every client's examples: a list of arrays, or a dict by the client's name. What it
returns is checked: an example has at most one owner, and nobody is left without any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import ConfigError, CoterieError, DataError
from coterie.core.extensions import added, with_options
from coterie.core.options import parameters, with_given_options
from coterie.core.user_code import in_user_code
from coterie.data.federation import Index
from coterie.data.partition.common import Labels

KIND = "partition"
CLIENTS = 20  # if their number is not given
GIVEN = ("labels", "clients", "seed", "owner")
Owner = NDArray[np.generic]
Dealt = list[Index] | dict[str, Index]  # the positions of every client's examples


def is_users(spec: str, known: Collection[str]) -> bool:
    """Return whether a specification names none of the `known` partitions, but a user's or a package's."""
    name, *words = spec.split(":")
    return name not in known and (name in added(KIND) or bool(words and words[0].isidentifier()))


def user_partition(spec: str, without_any: str) -> Callable[..., Dealt]:
    """Return a function that deals as a user's partition does, and checks what it returns.

    Args:
        spec: what messages call it.
        without_any: the same without the options that every partition has.

    Raises:
        ConfigError: there is no such function, or it does not have these options.
    """
    none: Mapping[str, Callable[..., Any]] = {}  # of the library's own
    function, words = with_options(KIND, without_any, none)
    ready = with_given_options(KIND, without_any, function, words, GIVEN)

    def deal(labels: Labels, clients: int | None, seed: int, owner: Owner | None, values: Mapping[str, Any]) -> Dealt:
        takes = parameters(function)
        if clients is not None and "clients" not in takes:
            raise ConfigError([f"clients = {clients}: partition '{spec}' has no parameter `clients`; leave this out"])
        given = {"labels": labels, "seed": seed, "owner": owner}
        if clients is not None or ("clients" in takes and takes["clients"].default is takes["clients"].empty):
            given["clients"] = CLIENTS if clients is None else clients
        try:
            found = ready(**{name: value for name, value in given.items() if name in takes})
        except CoterieError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}{in_user_code(error)}"
            raise DataError(f"partition '{spec}' failed: {why}") from error
        return checked(spec, found, len(labels), clients)

    return deal


def checked(spec: str, found: Any, size: int, clients: int | None) -> Dealt:
    """Return the parts as arrays in ascending order.

    Raises:
        DataError: they are not positions of `size` examples, a client has none, or two have the same one.
    """
    if not isinstance(found, Mapping | Sequence) or isinstance(found, str) or not len(found):
        raise DataError(
            f"partition '{spec}' returned {_what(found)}: it must return the positions of each client's examples, as a "
            "list of arrays or a dict of them by the client's name"
        )
    named = found if isinstance(found, Mapping) else {f"client-{i + 1}": part for i, part in enumerate(found)}
    if clients is not None and len(named) != clients:
        raise DataError(f"partition '{spec}' made {len(named)} clients, not {clients}: leave out clients, or see why")
    owners = np.full(size, -1, np.int64)
    parts: dict[str, Index] = {}
    for number, (client, part) in enumerate(named.items()):
        own = np.asarray(part)
        if own.ndim != 1 or (len(own) and own.dtype.kind not in "iu"):
            raise DataError(
                f"partition '{spec}': client '{client}' got {own.dtype} of shape {own.shape}, not a list of positions"
            )
        if not len(own):
            raise DataError(f"partition '{spec}' left client '{client}' without examples: leave it out, or see why")
        own = np.sort(own.astype(np.int64))
        if own[0] < 0 or own[-1] >= size:
            wrong = own[0] if own[0] < 0 else own[-1]
            raise DataError(f"partition '{spec}': client '{client}' got example {wrong}, but there are 0..{size - 1}")
        if len(twice := own[1:][own[1:] == own[:-1]]):
            raise DataError(f"partition '{spec}': client '{client}' got example {twice[0]} twice")
        if len(taken := own[owners[own] >= 0]):
            other = list(named)[owners[taken[0]]]
            raise DataError(f"partition '{spec}': example {taken[0]} went to '{other}' and to '{client}'")
        owners[own] = number
        parts[str(client)] = own
    return parts if isinstance(found, Mapping) else list(parts.values())


def _what(value: Any) -> str:
    return "nothing" if value is None else "no clients" if isinstance(value, Mapping | Sequence) else f"{type(value)}"
