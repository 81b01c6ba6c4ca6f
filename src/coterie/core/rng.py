"""Randomness: every draw comes from a generator seeded by (seed, purpose, round, client).

No generator is shared or carried from one draw to the next, so results do not depend on the order of clients, on chunk
sizes, on workers, or on whether a run was interrupted. Seeds use the clients' names and not their numbers, so
relabelling the clients only relabels the results.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.dropout import uniform as at_positions
from coterie.core.tree import Params

KEY_STEP = 0x51F15EED  # between the keys of two draws
ROUND_STEP = 0x5851F42D4C957F2D  # between the keys of two rounds, or of two draws of a whole model
_MASK = 0xFFFFFFFF


def seed_of(*parts: int | str) -> int:
    """Return a 64-bit seed, a hash of the parts that is the same on every machine."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def seeds_of(first: Sequence[int | str], last: Sequence[str]) -> NDArray[np.uint64]:
    """Return [len(last)], `seed_of(*first, name)` for every name in `last`; the common part is hashed once."""
    shared = hashlib.blake2b("\x1f".join([*map(str, first), ""]).encode(), digest_size=8)
    digests = []
    for name in last:
        digest = shared.copy()
        digest.update(name.encode())
        digests.append(digest.digest())
    return np.frombuffer(b"".join(digests), ">u8")


def generator(*parts: int | str) -> np.random.Generator:
    """Return a new NumPy generator, seeded by the parts."""
    return np.random.default_rng(seed_of(*parts))


def torch_generator(*parts: int | str) -> torch.Generator:
    """Return a new PyTorch generator on the CPU, seeded by the parts."""
    return torch.Generator().manual_seed(seed_of(*parts) % 2**63)


def keys_of(names: Sequence[str]) -> Tensor:
    """Return [len(names)] int64, a hash of each client's name."""
    return torch.tensor([seed_of("client", name) >> 1 for name in names])


def server_seed(seed: int) -> int:
    """Return `Population.seed` of a run with this seed."""
    return seed_of(seed, "server") >> 1


def normals(key: Tensor, like: Params) -> Params:
    """Return standard normal numbers with the names and shapes of `like`, each a hash of the int64 scalar `key`, the
    place of its tensor, and its position there (Box and Muller)."""
    drawn = {}
    for place, (name, leaf) in enumerate(like.items()):
        radius, angle = (at_positions(key + (2 * place + half + 1) * KEY_STEP, tuple(leaf.shape)) for half in (0, 1))
        drawn[name] = ((-2 * torch.log1p(-radius)).sqrt() * (2 * math.pi * angle).cos()).to(leaf)
    return drawn


def uniform(*keys: Tensor) -> Tensor:
    """Return numbers in [0, 1), a hash of the int64 `keys`, which are broadcast against each other.

    A number that is drawn from a client's key belongs to that client, whatever its position among the others.
    """
    bits = torch.zeros((), dtype=torch.int64)
    for key in keys:
        for half in (key & _MASK, (key >> 32) & _MASK):
            bits = _mixed(_mixed((bits ^ half) + 0x9E3779B9))
    return (bits >> 8).to(torch.float32) * 2.0**-24


def _mixed(x: Tensor) -> Tensor:
    """Mix 32 bits in int64 arithmetic; the multiplier is below 2^31, so the product does not overflow."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    return x ^ (x >> 15)
