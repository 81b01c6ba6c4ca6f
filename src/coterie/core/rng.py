"""Randomness: every draw comes from a generator seeded by (seed, purpose, round, client).

No generator is ever shared or carried from one draw to the next, so results do not depend on the order of clients, on
chunks, on workers, or on whether a run was interrupted. Clients are named, not numbered, so that relabelling them only
relabels the results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK = 0xFFFFFFFF


def seed_of(*parts: int | str) -> int:
    """64 bits from the parts, the same on every machine."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def seeds_of(first: Sequence[int | str], last: Sequence[str]) -> NDArray[np.uint64]:
    """`seed_of(*first, each)` for every one of `last`; what they share is read once."""
    shared = hashlib.blake2b("\x1f".join([*map(str, first), ""]).encode(), digest_size=8)
    digests = []
    for each in last:
        own = shared.copy()
        own.update(each.encode())
        digests.append(own.digest())
    return np.frombuffer(b"".join(digests), ">u8")


def generator(*parts: int | str) -> np.random.Generator:
    return np.random.default_rng(seed_of(*parts))


def torch_generator(*parts: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(*parts) % 2**63)


def keys_of(names: Sequence[str]) -> Tensor:
    """[len(names)] int64: a number for each name."""
    return torch.tensor([seed_of("client", name) >> 1 for name in names])


def uniform(*keys: Tensor) -> Tensor:
    """Numbers in [0, 1), a hash of the int64 `keys`, which are broadcast: drawn for whom they are, not for where."""
    bits = torch.zeros((), dtype=torch.int64)
    for key in keys:
        for half in (key & _MASK, (key >> 32) & _MASK):
            bits = _mixed(_mixed((bits ^ half) + 0x9E3779B9))
    return (bits >> 8).to(torch.float32) * 2.0**-24


def _mixed(x: Tensor) -> Tensor:
    """A 32-bit mixer in int64 arithmetic; the multiplier is below 2^31, so the product does not overflow."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    return x ^ (x >> 15)
