"""Masks: streams of random words from a key, which cancel in the sum over all sites.

    k_ij = HKDF-SHA256(X25519(s_i, the public half of s_j), info = run, round, session, the two names)   (`pair_key`)
    PRG(k) = ChaCha20 under the key k, as words modulo 2^64                                               (`stream`)
    m_i = PRG(b_i) + sum_{j after i} PRG(k_ij) - sum_{j before i} PRG(k_ij)                               (`mask`)

where `before` and `after` are by name. k_ij = k_ji, so that in the sum of all m_i only the PRG(b_i) are left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from coterie.deploy.secure.fixed_point import Words

WORD_BYTES = 8


class Session(NamedTuple):
    """What the keys of a round are bound to."""

    run: str
    round: int
    id: str  # chosen by the server; another one for each attempt at a round

    def text(self, what: str, *names: str) -> bytes:
        """Return this session, a purpose and names as bytes, for key derivations and signatures."""
        return "\x1f".join(["coterie masks", what, self.run, str(self.round), self.id, *names]).encode()


def public_half(secret: bytes) -> bytes:
    """Return the public half of an X25519 key of 32 bytes."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def commitment(session: Session, name: str, seed: bytes) -> bytes:
    """Return what binds a site to its seed b_i without telling it."""
    return hashlib.blake2b(session.text("seed", name) + seed, digest_size=32).digest()


def pair_key(session: Session, secret: bytes, own: str, other: str, public: bytes) -> bytes:
    """Return the key of the mask between two sites, from either's secret and the other's public half."""
    shared = X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(hashes.SHA256(), 32, None, session.text("pair", *sorted((own, other)))).derive(shared)


def seed_key(session: Session, name: str, seed: bytes) -> bytes:
    """Return the key of a site's mask of its own."""
    return HKDF(hashes.SHA256(), 32, None, session.text("own", name)).derive(seed)


def stream(key: bytes, length: int) -> Words:
    """Return so many random words; a key may be used for one stream only."""
    encryptor = Cipher(ChaCha20(key, bytes(16)), None).encryptor()
    return np.frombuffer(encryptor.update(bytes(WORD_BYTES * length)), dtype="<u8").astype(np.uint64, copy=False)


def total(words: Iterable[Words], length: int) -> Words:
    """Return the sum of words modulo 2^64."""
    found = np.zeros(length, np.uint64)
    for each in words:
        found += each
    return found


def between(session: Session, secret: bytes, own: str, others: Mapping[str, bytes], length: int) -> Words:
    """Return the sum of the masks between a site and others, given their public halves by name."""
    found = np.zeros(length, np.uint64)
    for other, public in others.items():
        words = stream(pair_key(session, secret, own, other, public), length)
        found = found + words if own < other else found - words
    return found


def mask(session: Session, secret: bytes, seed: bytes, own: str, others: Mapping[str, bytes], length: int) -> Words:
    """Return the whole mask of a site."""
    return stream(seed_key(session, own, seed), length) + between(session, secret, own, others, length)
