"""Real numbers as integers modulo 2^64, whose sums are exact and cannot overflow.

    x  ->  round(w x 2^f) mod 2^64,      |x| <= 2^16,  0 <= w <= W                     (`encode`)
    sum of at most n of them  ->  sum_i w_i x_i, each rounded to 2^-(f + 1)            (`decode`)

with f = floor(61 - 16 - log2(n W)), so that a sum of n is below 2^62 (`fraction_bits`). What is out of range is refused
before it is sent, so no sum is ever reduced modulo 2^64 but by its masks.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

RANGE_BITS = 16  # |x| is at most 2^16
SUM_BITS = 61
LEAST_FRACTION_BITS = 8

Words = npt.NDArray[np.uint64]  # integers modulo 2^64


class OutOfRange(ValueError):
    """A number is too large for fixed point; the text says which, and what is possible."""


def fraction_bits(sites: int, largest_weight: float) -> int:
    """Return f for sums over at most so many sites, none of which weighs more than `largest_weight`.

    Raises:
        OutOfRange: too few bits would be left.
    """
    bits = math.floor(SUM_BITS - RANGE_BITS - math.log2(sites * largest_weight))
    if bits < LEAST_FRACTION_BITS:
        raise OutOfRange(
            f"{sites} sites with weights up to {largest_weight:g} leave {bits} bits after the point, and "
            f"{LEAST_FRACTION_BITS} are needed"
        )
    return bits


def encode(values: Tensor, weight: float, largest_weight: float, bits: int) -> Words:
    """Return round(weight values 2^bits) modulo 2^64, of float64 values.

    Raises:
        OutOfRange: a value, or the weight, is out of range.
    """
    if not 0 <= weight <= largest_weight:
        raise OutOfRange(f"a weight of {weight:g}, where 0 to {largest_weight:g} is possible")
    most = float(values.abs().max()) if values.numel() else 0.0
    if not most <= 2**RANGE_BITS:
        raise OutOfRange(f"a value of {most:g}, where at most {2**RANGE_BITS} is possible")
    scaled = (values.double() * weight * 2.0**bits).round()
    return scaled.to(torch.int64).numpy().view(np.uint64)


def decode(total: Words, bits: int) -> Tensor:
    """Return a sum of encoded values as float64."""
    return torch.from_numpy(total.view(np.int64).astype(np.float64)) * 2.0**-bits
