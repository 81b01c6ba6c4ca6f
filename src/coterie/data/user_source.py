"""Data sources of users and of installed packages: a function that returns a federation, clients, or a pool.

`--data my_package.data:hospitals:count=8` calls `hospitals(count=8)`. Parameters called `seed`, `validation`, `test`
and `data_dir` are filled in with the run's settings. What the function returns may be

- a `Federation`: taken as it is;
- an (x, y) pair of tensors or a dataset for each client, in a dict by name or in a list: split into training,
  validation and test examples;
- a `Pool`, or one (x, y) pair of tensors: divided among clients by `--partition`, as a data set with a name is.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from coterie.core.errors import ConfigError, CoterieError, DataError
from coterie.core.extensions import added, with_options
from coterie.core.options import parameters, with_given_options
from coterie.core.user_code import in_user_code
from coterie.data.federation import Client, Federation
from coterie.data.pool import Pool

KIND = "data source"
GIVEN = ("seed", "validation", "test", "data_dir")  # filled in with the run's settings
IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*(:.*)?", re.S)
Clients = Mapping[str, Client] | Sequence[Client]


def is_user_source(data: str) -> bool:
    """Return whether `data` is an import path, or a name that an installed package adds, with or without options."""
    named = data.partition(":")[0] in added(KIND)
    return named or (IMPORT_PATH.fullmatch(data) is not None and not Path(data).exists())


def find_source(data: str) -> Callable[..., Any]:
    """Return a user's data source, with its options.

    Raises:
        ConfigError: there is none, or it does not have these options; it lists every problem.
    """
    none: Mapping[str, Callable[..., Any]] = {}  # of the library's own
    function, words = with_options(KIND, data, none)
    return with_given_options(KIND, data, function, words, GIVEN)


def defaults_of(data: str) -> dict[str, Any]:
    """Return the default settings of a run with this source: a dict `defaults` that the function has.

    Raises:
        ConfigError: there is no such source, or it does not have these options.
    """
    found = find_source(data)
    found = getattr(found, "func", found)
    defaults = getattr(found, "defaults", {})
    if not isinstance(defaults, Mapping):
        raise ConfigError([f"{KIND} '{data}': its `defaults` are a {type(defaults).__name__}, not a dict of settings"])
    return dict(defaults)


def read_source(data: str, **settings: Any) -> Federation | Pool | Clients:
    """Call a user's data source.

    Args:
        data: its name or import path, with options.
        **settings: the run's settings that `GIVEN` names.

    Raises:
        ConfigError: there is no such source, or it does not have these options.
        DataError: it failed, with the user's line, or returned something else.
    """
    function = find_source(data)
    asked = {key: value for key, value in settings.items() if key in parameters(function)}
    try:
        found = function(**asked)
    except CoterieError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}{in_user_code(error)}"
        raise DataError(f"{KIND} '{data}' failed: {why}") from error
    return _checked(data, found)


def _checked(data: str, found: Any) -> Federation | Pool | Clients:
    if isinstance(found, Federation):
        return found
    if isinstance(found, Pool):
        return dataclasses.replace(found, x=_single(found.x), y=_targets(found.y, found.num_classes))
    if isinstance(found, tuple) and len(found) == 2 and all(isinstance(each, Tensor | np.ndarray) for each in found):
        return _pool(data, *map(torch.as_tensor, found))
    clients = list(found.values()) if isinstance(found, Mapping) else found
    if not isinstance(clients, Sequence) or isinstance(clients, str) or not clients:
        raise DataError(f"{KIND} '{data}' returned {_what(found)}; {EXPECTED}")
    for client in clients:
        if not isinstance(client, Dataset) and not (isinstance(client, tuple | list) and len(client) == 2):
            raise DataError(f"{KIND} '{data}' returned {_what(client)} for a client; {EXPECTED}")
    if isinstance(found, Mapping):
        return {str(name): _client(client) for name, client in found.items()}
    return [_client(client) for client in clients]


EXPECTED = "it must return a Federation, a Pool, one (x, y) pair of tensors, or such a pair for each client"


def _pool(data: str, x: Tensor, y: Tensor) -> Pool:
    if y.is_floating_point() or not len(y):
        return Pool(data, _single(x), y.float(), None)
    return Pool(data, _single(x), y.long(), max(int(y.max()) + 1, 2))


def _client(client: Any) -> Client:
    if isinstance(client, Dataset):
        return client
    x, y = map(torch.as_tensor, client)
    return _single(x), y


def _single(x: Tensor) -> Tensor:
    """Return NumPy's usual float64 as the float32 that models have; images of bytes stay bytes."""
    return x.float() if x.dtype == torch.float64 else x


def _targets(y: Tensor, num_classes: int | None) -> Tensor:
    return y.float() if num_classes is None else y.long()


def _what(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
