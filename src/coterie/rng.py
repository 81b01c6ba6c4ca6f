"""Randomness: every draw comes from a generator seeded by (seed, purpose, round, client).

No generator is ever shared or carried from one draw to the next, so results do not depend on the order of clients, on
chunks, on workers, or on whether a run was interrupted. Clients are named, not numbered, so that relabelling them only
relabels the results.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def seed_of(*parts: int | str) -> int:
    """64 bits from the parts, the same on every machine."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def generator(*parts: int | str) -> np.random.Generator:
    return np.random.default_rng(seed_of(*parts))


def torch_generator(*parts: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(*parts) % 2**63)
