"""Sums in fixed point are exact, and cannot overflow."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.deploy.secure.fixed_point import (
    LEAST_FRACTION_BITS,
    RANGE_BITS,
    OutOfRange,
    decode,
    encode,
    fraction_bits,
)


def test_halves_by_hand():
    """f = 2: 1.5 * 3 = 4.5 is 18 quarters, and -0.25 * 3 is -3 of them, modulo 2^64."""
    words = encode(torch.tensor([1.5, -0.25, 0.0]), 3.0, 10.0, 2)
    assert words.tolist() == [18, 2**64 - 3, 0]
    assert decode(words, 2).tolist() == [4.5, -0.75, 0.0]


def test_bits_by_hand():
    assert fraction_bits(4, 2.0) == 61 - 16 - 3
    assert fraction_bits(3, 1.0) == 43  # 45 - log2(3)
    with pytest.raises(OutOfRange, match=r"1000 sites with weights up to 1e\+12 leave -5 bits"):
        fraction_bits(1000, 1e12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.floats(-(2**RANGE_BITS), 2**RANGE_BITS), st.floats(0, 1)), min_size=1, max_size=20),
    st.floats(1, 1e6),
)
def test_a_sum_is_that_of_the_numbers_within_rounding(terms, largest):
    bits = fraction_bits(len(terms), largest)
    total = np.zeros(1, np.uint64)
    for value, share in terms:
        total += encode(torch.tensor([value], dtype=torch.float64), share * largest, largest, bits)
    expected = sum(value * (share * largest) for value, share in terms)
    size = sum(abs(value) * share * largest for value, share in terms)
    assert abs(float(decode(total, bits)) - expected) <= len(terms) * (2.0 ** -(bits + 1)) + 1e-12 * size


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(3, 1000), st.floats(1, 1e7), st.sampled_from([-1, 1]))
def test_the_largest_sum_does_not_overflow(sites, largest, sign):
    bits = fraction_bits(sites, largest)
    assert bits >= LEAST_FRACTION_BITS
    one = encode(torch.tensor([sign * 2.0**RANGE_BITS]).double(), largest, largest, bits)
    exact = sites * int(one.view(np.int64)[0])
    assert abs(exact) < 2**62
    assert float(decode(one * np.uint64(sites), bits)) == pytest.approx(sign * sites * largest * 2**RANGE_BITS)


@pytest.mark.parametrize("value", [65537.0, float("inf"), float("nan")])
def test_what_is_out_of_range_is_refused_in_words(value):
    with pytest.raises(OutOfRange, match=r"a value of .*, where at most 65536 is possible"):
        encode(torch.tensor([0.0, value]), 1.0, 1.0, 10)
    for weight in (-1.0, 1.1, float("nan")):
        with pytest.raises(OutOfRange, match="a weight of"):
            encode(torch.tensor([0.0]), weight, 1.0, 10)
