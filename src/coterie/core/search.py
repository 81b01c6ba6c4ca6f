"""Where `coterie tune` looks for a hyper-parameter: a marker that stands beside its `Field`.

    lam: Annotated[float, Search(1e-2, 1e1), Field(ge=0, description="...")] = 1.0

Without a marker, a choice of words is searched among all its words, and a number between its limits if it has two.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Search:
    """The range in which a number is searched, both ends included.

    Attributes:
        low: the smallest value that is tried.
        high: the largest.
        log: values are spread evenly by their logarithm, which suits most strengths and step sizes.
    """

    low: float
    high: float
    log: bool = True


@dataclass(frozen=True)
class Unsearched:
    """Mark what is searched only if the user asks: it makes another method of it, or hardly matters."""


UNSEARCHED = Unsearched()
