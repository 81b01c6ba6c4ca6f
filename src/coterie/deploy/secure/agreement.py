"""What sites and server must agree on before a secure sum: who can have one, how messages become words, and t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import ConfigError
from coterie.deploy import guard, messages
from coterie.deploy.federation_facts import FederationFacts
from coterie.deploy.refused import Refused
from coterie.deploy.secure import fixed_point
from coterie.deploy.secure.fixed_point import OutOfRange, Words
from coterie.experiment.config import Config
from coterie.methods.fields import AnyMethod
from coterie.parts import sums
from coterie.parts.robust import averaged_fields

LEAST_SITES = 3  # of two sites, each knows the other's message from the sum
MOST_SITES = messages.MAX_MASKED  # in one round: every pair has a mask
LEAST_WEIGHT_BITS = 20  # of the sum of weights, so that the mean has so many


def threshold(sites: int, share: float) -> int:
    """Return t, how many of a round's sites must still be there to recover the sum: always more than half of them."""
    return max(sites // 2 + 1, math.ceil(share * sites))


def problems(config: Config, method: AnyMethod, sites: int) -> list[str]:
    """Return why this federation cannot aggregate securely, in words."""
    found = []
    if config.topology != "server":
        found.append("peers send nothing to a server: their mail is sealed already, so leave secure out")
    elif config.method == "local":
        found.append("local sends nothing, so leave secure out")
    elif (reason := sums.why_not(method)) is not None:
        found.append(f"{config.method} cannot be summed: {reason} (coterie methods lists those that can)")
    if config.robust is not None:
        found.append("robust averages need every single message, and secure sums hide them: leave one of them out")
    if config.clients_heard is not None:
        found.append("clients_heard chooses among messages that were sent, which secure sums hide: leave it out")
    taking_part = config.participants(sites)
    if not LEAST_SITES <= taking_part <= MOST_SITES:
        found.append(
            f"{taking_part} sites take part in a round, and {LEAST_SITES} to {MOST_SITES} are needed, "
            "since of two sites each knows the other's message from the sum"
        )
    return [f"deploy.secure: {problem}" for problem in found]


class Form(NamedTuple):
    """How the messages of a federation become words."""

    method: AnyMethod
    message: Any  # a message, of which only names, shapes and types matter
    fields: tuple[str, ...]  # of it that are summed
    largest: float  # the largest weight
    bits: int  # after the point

    @classmethod
    def of(cls, method: AnyMethod, message: Any, facts: FederationFacts) -> Form:
        """Return the form that every site and the server find for themselves."""
        largest = sums.largest_weight(method, message, facts.largest)
        try:
            bits = fixed_point.fraction_bits(facts.audience, largest)
        except OutOfRange as error:
            raise ConfigError([f"deploy.secure: {error}"]) from error
        return cls(method, message, averaged_fields(method), largest, bits)

    @property
    def length(self) -> int:
        """The number of words of a message; the last one is its weight."""
        return sum(leaf.numel() for name in self.fields for leaf in tree.leaves(getattr(self.message, name))) + 1

    @property
    def masked(self) -> dict[str, Tensor]:
        """The form of what is sent instead of the message."""
        return {"masked": torch.zeros(self.length, dtype=torch.int64)}

    def encode(self, up: Any, examples: int, norm_bound: float) -> Words:
        """Return a site's message as words; raise `Refused` where a server would refuse it, which cannot see it."""
        guard.check_message(self.method, up, examples, norm_bound)
        values, weight = sums.summed(up, self.fields)
        try:
            return fixed_point.encode(torch.cat([values, torch.ones(1).double()]), weight, self.largest, self.bits)
        except OutOfRange as error:
            raise Refused("range", str(error)) from error

    def decode(self, total: Words, examples: Sequence[int], norm_bound: float) -> Any:
        """Return the message that stands for each of the sites whose words add up to `total`.

        Args:
            total: the sum of the words of `encode`.
            examples: how many examples each of these sites declared.
            norm_bound: of one message, and so of a mean of messages.

        Raises:
            Refused: that cannot be a sum of true messages.
        """
        decoded = fixed_point.decode(total, self.bits)
        weight = float(decoded[-1])
        most = sum(sums.largest_weight(self.method, self.message, each) for each in examples)
        if not 0 < weight <= most:
            raise Refused("bad-count", f"weights that add up to {weight:g}, where 0 to {most:g} is possible")
        if weight < 2.0 ** (LEAST_WEIGHT_BITS - self.bits):
            raise Refused("range", f"weights that add up to {weight:g} only, too little for fixed point")
        up = sums.alike(decoded[:-1] / weight, weight, len(examples), self.fields, self.message)
        guard.check_finite(up)
        guard.check_norm(up, norm_bound)
        return up
