"""Encrypts mail between two sites so that the relay cannot read it: X25519 and ChaCha20-Poly1305.

    key = HKDF-SHA256(X25519(own secret, the other's public), info = "coterie", run, round, sender, receiver, what)

Each message has its own key. Both ends need the right secrets, so whoever can open a message also knows who wrote it. A
site's exchange key is made once and signed with the key that identifies the site. If a site has the others' public keys
(`keys`), it checks that signature against them. If not, it trusts the first key that it sees for each name, which stops
a curious relay, but not one that lied from the first day.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import AfterValidator, Field

from coterie.core.errors import CoterieError
from coterie.deploy import keys
from coterie.deploy.keys import Identity
from coterie.deploy.refused import Refused
from coterie.deploy.schema import Digest, PublicKey, Strict
from coterie.storage import files

NONCE_BYTES = 12
OVERHEAD_BYTES = NONCE_BYTES + 16  # that sealing adds
Signature = Annotated[str, Field(max_length=1000, pattern=r"^([0-9a-f]{2})*$")]


@dataclass(frozen=True)
class Route:
    """What a letter's key is bound to."""

    run: str
    round: int
    sender: str
    receiver: str
    what: str = "message"  # or "offer", of what the receiver asked for

    def text(self) -> bytes:
        """Return the route as bytes, for the key derivation."""
        return "\x1f".join(["coterie", self.run, str(self.round), self.sender, self.receiver, self.what]).encode()


def exchange_key_at(path: Path) -> X25519PrivateKey:
    """Read the site's secret key; generate it if there is none. Only its owner can read the file."""
    if not path.exists():
        files.write(
            path, lambda temporary: keys.write_private(temporary, X25519PrivateKey.generate().private_bytes_raw())
        )
    data = path.read_bytes()
    if len(data) != 32:
        raise CoterieError(f"'{path}' is not an exchange key: it has {len(data)} bytes instead of 32")
    return X25519PrivateKey.from_private_bytes(data)


def usable(exchange: str) -> str:
    """Refuse the few public keys with which nothing can be agreed: whoever writes to their owner would fail."""
    X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(exchange)))
    return exchange


ExchangeKey = Annotated[Digest, AfterValidator(usable)]  # 32 bytes as hexadecimal text


class Card(Strict):
    """What others need to write to a site, signed by the site."""

    exchange: ExchangeKey  # its public exchange key
    key: PublicKey  # by which it is known
    proof: Signature


def make_card(name: str, secret: X25519PrivateKey, identity: Identity) -> Card:
    """Return what others need to write to this site, signed by the site."""
    public = secret.public_key().public_bytes_raw().hex()
    return Card(exchange=public, key=identity.public, proof=identity.sign(_claim(name, public)).hex())


def check_card(name: str, card: Card, known: Mapping[str, str], pinned: Mapping[str, Card]) -> None:
    """Raise `Refused` unless the site's key (the known one, or the first one seen) signed the card."""
    expected = known.get(name) or pinned.get(name, card).key
    if not keys.same_key(expected, card.key):
        raise Refused("bad-signature", f"the key of '{name}' is not the one known")
    if not keys.verified(card.key, bytes.fromhex(card.proof), _claim(name, card.exchange)):
        raise Refused("bad-signature", f"the exchange key of '{name}' is not signed by it")


def seal(data: bytes, secret: X25519PrivateKey, other: str, route: Route) -> bytes:
    """Encrypt data for the owner of the public key `other`."""
    nonce = os.urandom(NONCE_BYTES)
    return nonce + _cipher(secret, other, route).encrypt(nonce, data, route.text())


def unseal(data: bytes, secret: X25519PrivateKey, other: str, route: Route) -> bytes:
    """Decrypt data from the owner of the public key `other`; raise `Refused` if it is not authentic."""
    try:
        return _cipher(secret, other, route).decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], route.text())
    except (InvalidTag, ValueError) as error:
        raise Refused("not-sealed") from error


def _cipher(secret: X25519PrivateKey, other: str, route: Route) -> ChaCha20Poly1305:
    shared = secret.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other)))
    return ChaCha20Poly1305(HKDF(hashes.SHA256(), 32, None, route.text()).derive(shared))


def _claim(name: str, public: str) -> bytes:
    return f"coterie exchange key of {name}: {public}".encode()
