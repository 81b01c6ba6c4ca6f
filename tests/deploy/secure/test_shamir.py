"""Any t shares give the secret back; fewer say nothing."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.deploy.secure import shamir
from coterie.deploy.secure.shamir import PRIME, combine, split


def number(share: bytes) -> int:
    return int.from_bytes(share, "big")


def test_a_line_through_two_points(monkeypatch):
    """f(x) = 7 + 5 x: shares 12, 17, 22; any two give 7."""
    monkeypatch.setattr(shamir.secrets, "randbelow", lambda _: 5)
    shares = split((7).to_bytes(32, "big"), 3, 2)
    assert [number(each) for each in shares] == [12, 17, 22]
    for x, y in combinations((1, 2, 3), 2):
        assert combine({x: shares[x - 1], y: shares[y - 1]}) == (7).to_bytes(32, "big")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.binary(min_size=32, max_size=32), st.integers(1, 12), st.data())
def test_any_t_of_n_shares_give_the_secret(secret, holders, data):
    threshold = data.draw(st.integers(1, holders))
    shares = split(secret, holders, threshold)
    some = data.draw(st.permutations(range(1, holders + 1)))
    for number in {threshold, holders}:
        assert combine({x: shares[x - 1] for x in some[:number]}) == secret


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_fewer_shares_fit_every_secret(secret, other):
    """For two of three shares and any other secret there is a polynomial of the degree that gives those shares."""
    shares = split(secret, 3, 3)
    points = {0: int.from_bytes(other, "big"), 1: number(shares[0]), 2: number(shares[1])}

    def through(x: int) -> int:
        total = 0
        for a, value in points.items():
            for b in points:
                if a != b:
                    value = value * (x - b) * pow(a - b, -1, PRIME) % PRIME
            total += value
        return total % PRIME

    third = through(3).to_bytes(shamir.SHARE_BYTES, "big")
    assert combine({1: shares[0], 2: shares[1], 3: third}) == other


def test_what_is_not_a_share_is_noticed_or_gives_another_secret():
    shares = split(bytes(32), 3, 2)
    with pytest.raises(ValueError, match="not shares of one secret"):
        combine({1: shares[0], 2: bytes([1] * shamir.SHARE_BYTES)})
    with pytest.raises(ValueError, match="31 bytes"):
        split(bytes(31), 3, 2)
    with pytest.raises(ValueError, match="4 of 3"):
        split(bytes(32), 3, 4)
