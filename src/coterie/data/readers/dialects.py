"""Makes a federation of eight villages that report the weather in two dialects: tokens for models of sequences.

A report names hot, cold, wet or dry, once, among other words; where it also says NOT, before or after, the opposite is
meant, and that is its class:

    hot -> hot       NOT ... hot -> cold       wet -> wet       wet ... NOT -> dry

So what NOT does to a class depends on another word: no sum of a score for each word tells hot from cold. Each of the
four has six words. Four of them mean the same everywhere. The other two are false friends: in the second dialect, of
the last three villages, they mean the opposite. A model for everybody must be wrong about these in one dialect, while a
village alone, with 40 to 160 reports to train on, has seen too few to learn the language. Every village has 40 more
reports for validation and 400 for testing; the shares `validation` and `test` do not apply.

Token 0 is padding (reports have 5 to 10 words), 1 is NOT, 2 to 25 are the words of weather, and the others are filler.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.core import rng
from coterie.data.federation import Federation, Split

WEATHER, OPPOSITE = ("hot", "cold", "wet", "dry"), (1, 0, 3, 2)
WORDS, SAME_EVERYWHERE, FILLERS = 6, 4, 14
NOT, FIRST_WORD = 1, 2
FIRST_FILLER = FIRST_WORD + len(WEATHER) * WORDS
VOCABULARY = FIRST_FILLER + FILLERS
SHORTEST, LENGTH = 5, 10
FIRST_DIALECT = {"hill": 40, "lake": 60, "mill": 80, "ford": 120, "dale": 160}  # reports to train on
SECOND_DIALECT = {"cove": 60, "cape": 80, "reef": 120}
VALIDATION, TEST = 40, 400

Tokens = NDArray[np.int64]


def dialects(name: str, seed: int, validation: float, test: float) -> Federation:
    """Make the federation; its splits are part of it."""
    xs, ys, clients, start = [], [], {}, 0
    for client, train in {**FIRST_DIALECT, **SECOND_DIALECT}.items():
        size = train + VALIDATION + TEST
        x, y = reports(rng.generator(seed, name, client), size, second=client in SECOND_DIALECT)
        clients[client] = Split(*np.split(start + np.arange(size), [train, train + VALIDATION]))
        xs.append(x)
        ys.append(y)
        start += size
    x_all, y_all = (torch.from_numpy(np.concatenate(part)) for part in (xs, ys))
    return Federation(name, x_all, y_all, clients, len(WEATHER), WEATHER)


def reports(draw: np.random.Generator, size: int, *, second: bool) -> tuple[Tokens, Tokens]:
    """Draw reports, [size, LENGTH], and their classes, [size]."""
    said, word = draw.integers(len(WEATHER), size=size), draw.integers(WORDS, size=size)
    opposite, negated = np.array(OPPOSITE), draw.random(size) < 0.5
    meant = np.where((word >= SAME_EVERYWHERE) & second, opposite[said], said)
    y = np.where(negated, opposite[meant], meant)
    x = FIRST_FILLER + draw.integers(FILLERS, size=(size, LENGTH))
    length = draw.integers(SHORTEST, LENGTH + 1, size=size)
    x[np.arange(LENGTH) >= length[:, None]] = 0
    place = draw.integers(length)
    beside = (place + draw.integers(1, length)) % length  # any other place
    every = np.arange(size)
    x[every, place] = FIRST_WORD + said * WORDS + word
    x[every[negated], beside[negated]] = NOT
    return x, y
