"""Mail between two sites that the relay cannot read: X25519 for the key, ChaCha20-Poly1305 for the content.

    key = HKDF-SHA256(X25519(own secret, the other's public), info = "coterie", run, round, sender, receiver)

Each message has a key of its own, and both ends must have had the right secrets: who can open it knows who wrote it.
A site's exchange key is made once and signed with the key that identifies the site. A site that was given the others'
public keys (`keys`) checks that signature against them; one that was not takes the first key it sees for each name and
keeps to it, which stops a curious relay, but not one that lied from the first day.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from coterie.deploy import keys
from coterie.deploy.keys import Identity
from coterie.deploy.refused import Refused
from coterie.errors import CoterieError
from coterie.experiment import files

NONCE = 12


@dataclass(frozen=True)
class Route:
    run: str
    round: int
    sender: str
    receiver: str

    def text(self) -> bytes:
        return "\x1f".join(["coterie", self.run, str(self.round), self.sender, self.receiver]).encode()


def exchange_key_at(path: Path) -> X25519PrivateKey:
    """The site's secret, which is made where there is none; readable by its owner only."""
    if not path.exists():
        files.write(
            path, lambda temporary: keys.write_private(temporary, X25519PrivateKey.generate().private_bytes_raw())
        )
    data = path.read_bytes()
    if len(data) != 32:
        raise CoterieError(f"'{path}' is not an exchange key: it has {len(data)} bytes instead of 32")
    return X25519PrivateKey.from_private_bytes(data)


def card(name: str, secret: X25519PrivateKey, identity: Identity) -> dict[str, str]:
    """What others need to write to this site, signed by it."""
    public = secret.public_key().public_bytes_raw().hex()
    return {"exchange": public, "key": identity.public, "proof": identity.sign(_claim(name, public)).hex()}


def check_card(name: str, told: Any, known: Mapping[str, str], pinned: Mapping[str, Any]) -> dict[str, str]:
    """A card that is signed by the site's key: the one known, or the one seen first."""
    if not isinstance(told, dict) or any(type(told.get(key)) is not str for key in ("exchange", "key", "proof")):
        raise Refused("bad-header", f"the keys of '{name}' cannot be read")
    expected = known.get(name) or pinned.get(name, told)["key"]
    if not keys.same_key(expected, told["key"]):
        raise Refused("bad-signature", f"the key of '{name}' is not the one known")
    try:
        proof = bytes.fromhex(told["proof"])
    except ValueError as error:
        raise Refused("bad-signature") from error
    if not keys.verified(told["key"], proof, _claim(name, told["exchange"])):
        raise Refused("bad-signature", f"the exchange key of '{name}' is not signed by it")
    return {key: told[key] for key in ("exchange", "key", "proof")}


def seal(data: bytes, secret: X25519PrivateKey, other: str, route: Route) -> bytes:
    nonce = os.urandom(NONCE)
    return nonce + _cipher(secret, other, route).encrypt(nonce, data, route.text())


def unseal(data: bytes, secret: X25519PrivateKey, other: str, route: Route) -> bytes:
    try:
        return _cipher(secret, other, route).decrypt(data[:NONCE], data[NONCE:], route.text())
    except (InvalidTag, ValueError) as error:
        raise Refused("not-sealed") from error


def _cipher(secret: X25519PrivateKey, other: str, route: Route) -> ChaCha20Poly1305:
    shared = secret.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other)))
    return ChaCha20Poly1305(HKDF(hashes.SHA256(), 32, None, route.text()).derive(shared))


def _claim(name: str, public: str) -> bytes:
    return f"coterie exchange key of {name}: {public}".encode()
