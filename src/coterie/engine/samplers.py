"""Who takes part in a round: client samplers.

    uniform        every client with the same chance                                          (`Uniform`)
    by-size        one after another, with chances n_i / (sum of n_j of those who are left)   (`BySize`)
    round-robin    in turns, in a random order that stays: all equally often, but for one     (`RoundRobin`)

A sampler of your own is a function `f(clients, number, round, seed)`, or a frozen dataclass that extends `Sampler`; its
fields are options. It returns names of clients. It is called by simulations and by a server on its own machine alike,
and may be called more than once for a round, so that its result must depend on nothing but its arguments: draw random
numbers from a hash of the seed, the round and the clients' names (`coterie.core.rng`). Clients come in the order of
their names, so that the result cannot depend on anybody's position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coterie.core import rng
from coterie.core.errors import ConfigError
from coterie.core.user_code import in_user_code

Function = Callable[[Mapping[str, int], int, int, int], Collection[str]]


class Sampler(ABC):
    """Chooses clients. A subclass is a frozen dataclass of its options."""

    @abstractmethod
    def __call__(self, clients: Mapping[str, int], number: int, round: int, seed: int) -> Collection[str]:
        """Return the names of the clients that take part in a round: at least one, and at most `number`.

        Args:
            clients: the number of training examples of every client, in the order of their names.
            number: how many the run asks for.
            round: its number, from 1.
            seed: the run's seed.
        """


@dataclass(frozen=True)
class Uniform(Sampler):
    """Each client draws a number by its name, and those with the smallest take part."""

    def __call__(self, clients: Mapping[str, int], number: int, round: int, seed: int) -> Collection[str]:
        names = list(clients)
        return [names[i] for i in smallest(rng.seeds_of((seed, "participation", round), names), number)]


@dataclass(frozen=True)
class BySize(Sampler):
    """Clients with more examples take part more often.

    Each draws an exponentially distributed number by its name, over its number of examples; those with the smallest
    take part (Efraimidis and Spirakis, 2006).
    """

    def __call__(self, clients: Mapping[str, int], number: int, round: int, seed: int) -> Collection[str]:
        names, sizes = list(clients), np.array(list(clients.values()), float)
        uniform = (rng.seeds_of((seed, "participation", round), names) + 0.5) / 2.0**64
        return [names[i] for i in smallest(-np.log(uniform) / sizes, number)]


@dataclass(frozen=True)
class RoundRobin(Sampler):
    """Clients take turns, so that each has taken part as often as the others, or once more."""

    def __call__(self, clients: Mapping[str, int], number: int, round: int, seed: int) -> Collection[str]:
        names = list(clients)
        order = rng.seeds_of((seed, "turns"), names).argsort(kind="stable")
        begin = (round - 1) * number
        return [names[order[place % len(names)]] for place in range(begin, begin + min(number, len(names)))]


SAMPLERS: dict[str, type[Sampler]] = {"uniform": Uniform, "by-size": BySize, "round-robin": RoundRobin}


def smallest(values: np.ndarray, number: int) -> list[int]:
    """Return the positions of the smallest values, in order."""
    chosen: list[int] = sorted(values.argsort(kind="stable")[:number].tolist())
    return chosen


class Turnout:
    """Who takes part in each round: what a sampler says, checked.

    Args:
        sampler: chooses; None: all have the same chance.
        names: all clients.
        sizes: their numbers of training examples.
        number: how many the run asks for.
        seed: the run's seed.
    """

    def __init__(
        self, sampler: Function | None, names: Sequence[str], sizes: Sequence[int], number: int, seed: int
    ) -> None:
        self._sampler, self._number, self._seed = sampler or Uniform(), min(number, len(names)), seed
        self._place = {name: i for i, name in enumerate(names)}
        self._clients = {name: int(sizes[self._place[name]]) for name in sorted(names)}

    def of(self, round: int) -> list[int]:
        """Return the numbers of the clients that take part in a round, in order.

        Raises:
            ConfigError: the sampler fails, or returns something else than names of at least one client and no more than
                it was asked for.
        """
        if self._number == len(self._place) and type(self._sampler) in SAMPLERS.values():
            return list(range(self._number))
        try:
            chosen = list(self._sampler(self._clients, self._number, round, self._seed))
        except Exception as error:
            why = f"{type(error).__name__}: {error}{in_user_code(error)}"
            raise ConfigError([f"sampler: it fails in round {round}: {why}"]) from error
        unknown = [repr(name) for name in chosen if not isinstance(name, str) or name not in self._place]
        if unknown:
            raise ConfigError(
                [
                    f"sampler: in round {round} it returns {', '.join(unknown[:5])}: return names of clients, such as "
                    f"'{next(iter(self._clients))}'"
                ]
            )
        different = len(set(chosen))
        if different < len(chosen) or not 1 <= different <= self._number:
            raise ConfigError(
                [
                    f"sampler: in round {round} it returns {len(chosen)} names, {different} of them different: return "
                    f"at least one and at most {self._number}, each once"
                ]
            )
        return sorted(self._place[name] for name in chosen)
