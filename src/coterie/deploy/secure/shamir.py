"""Shamir's secret sharing: any t of n shares give the secret back, and fewer say nothing about it.

    f(x) = secret + a_1 x + ... + a_(t-1) x^(t-1)  mod p,   a_k random          (`split`)
    share of holder x = 1, ..., n:  f(x)
    secret = f(0) = sum_x f(x) prod_{y != x} y / (y - x)  mod p                 (`combine`; Lagrange)

over the field of p = 2^521 - 1, a prime. Secrets are 32 bytes.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping

PRIME = 2**521 - 1
SECRET_BYTES = 32
SHARE_BYTES = 66


def split(secret: bytes, holders: int, threshold: int) -> list[bytes]:
    """Return the shares of holders 1 to `holders`, of which any `threshold` give the secret back."""
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= holders:
        raise ValueError(f"a secret of {len(secret)} bytes for {threshold} of {holders} holders")
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [_value(coefficients, x).to_bytes(SHARE_BYTES, "big") for x in range(1, holders + 1)]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of at least `threshold` shares, by their holders' numbers.

    Raises:
        ValueError: these are not shares of one secret.
    """
    holders = tuple(sorted(shares))
    weights = _weights_at_zero(holders)
    secret = sum(weight * int.from_bytes(shares[x], "big") for x, weight in zip(holders, weights, strict=True)) % PRIME
    if secret >= 1 << (8 * SECRET_BYTES):
        raise ValueError("these are not shares of one secret")
    return secret.to_bytes(SECRET_BYTES, "big")


def _value(coefficients: list[int], x: int) -> int:
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * x + coefficient) % PRIME
    return total


@functools.lru_cache(maxsize=32)
def _weights_at_zero(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Return prod_{y != x} y / (y - x) modulo the prime for each holder x."""
    found = []
    for x in holders:
        above, below = 1, 1
        for y in holders:
            if y != x:
                above, below = above * y % PRIME, below * (y - x) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(found)
