"""Masks cancel in the sum of all, and hide every part of it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.deploy.secure import masks
from coterie.deploy.secure.masks import Session, between, mask, public_half, seed_key, stream

ROUND = Session("run", 3, "0" * 32)


def secrets_of(names, start: int = 1):
    return {name: (bytes([start + 2 * i] * 32), bytes([start + 2 * i + 1] * 32)) for i, name in enumerate(names)}


def masks_of(names, session=ROUND, length=5):
    known = secrets_of(names)
    public = {name: public_half(secret) for name, (secret, _) in known.items()}
    found = {}
    for name, (secret, seed) in known.items():
        others = {other: public[other] for other in names if other != name}
        found[name] = mask(session, secret, seed, name, others, length)
    return known, public, found


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.lists(st.text("abcxyz", min_size=1, max_size=4), min_size=2, max_size=6, unique=True))
def test_only_own_masks_are_left_in_the_sum(names):
    known, _, found = masks_of(names)
    total = masks.total(found.values(), 5)
    for name, (_, seed) in known.items():
        total = total - stream(seed_key(ROUND, name, seed), 5)
    assert not total.any()


def test_the_key_of_one_that_is_gone_takes_its_masks_away():
    known, public, found = masks_of(["a", "b", "c", "d"])
    heard = ["a", "c", "d"]
    total = masks.total((found[name] for name in heard), 5)
    for name in heard:
        total = total - stream(seed_key(ROUND, name, known[name][1]), 5)
    assert total.any()
    assert not (total + between(ROUND, known["b"][0], "b", {name: public[name] for name in heard}, 5)).any()


def test_a_mask_without_either_secret_is_a_mask():
    """Neither the pairs' masks alone nor the own one alone uncover a message."""
    known, public, found = masks_of(["a", "b", "c"])
    others = {name: public[name] for name in "bc"}
    own = stream(seed_key(ROUND, "a", known["a"][1]), 5)
    pairs = between(ROUND, known["a"][0], "a", others, 5)
    assert (found["a"] == own + pairs).all()
    assert own.all()
    assert pairs.all()


@pytest.mark.parametrize(
    "session", [Session("other", 3, "0" * 32), Session("run", 4, "0" * 32), Session("run", 3, "1" * 32)]
)
def test_every_session_has_masks_of_its_own(session):
    assert (masks_of("abc")[2]["a"] != masks_of("abc", session)[2]["a"]).all()


def test_pairs_have_one_key_and_it_is_theirs():
    known, public, _ = masks_of("abc")
    one = masks.pair_key(ROUND, known["a"][0], "a", "b", public["b"])
    assert one == masks.pair_key(ROUND, known["b"][0], "b", "a", public["a"])
    assert one != masks.pair_key(ROUND, known["a"][0], "a", "c", public["c"])


def test_streams_look_random_and_are_the_published_cipher():
    """The first block of ChaCha20 with a zero key and nonce (RFC 8439, A.1, test vector 1)."""
    words = stream(bytes(32), 100_000)
    assert words[0] == int.from_bytes(bytes.fromhex("76b8e0ada0f13d90"), "little")
    bits = np.unpackbits(words.view(np.uint8))
    assert abs(bits.mean() - 0.5) < 4 * 0.5 / len(bits) ** 0.5
    assert len(set(words.tolist())) == len(words)
