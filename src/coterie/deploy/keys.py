"""Keys that identify sites.

A site signs its messages with the key that its SuperNode shows to the SuperLink: an elliptic curve key, as made by
`ssh-keygen -t ecdsa` or `coterie flower certs`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.core.errors import CoterieError
from coterie.storage import files

HASH = ec.ECDSA(hashes.SHA384())


@dataclass(frozen=True)
class Identity:
    """A private key, and its public half as one line of text."""

    private: ec.EllipticCurvePrivateKey

    @property
    def public(self) -> str:
        form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        return self.private.public_key().public_bytes(*form).decode()

    def sign(self, data: bytes) -> bytes:
        """Return the signature of `data`."""
        return self.private.sign(data, HASH)


def make_identity() -> Identity:
    """Generate a new key."""
    return Identity(ec.generate_private_key(ec.SECP384R1()))


def write_identity(path: Path, identity: Identity) -> None:
    """Write PATH, readable only by its owner, and PATH.pub."""
    form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    files.write(path, lambda temporary: write_private(temporary, identity.private.private_bytes(*form)))
    files.write_text(path.with_name(path.name + ".pub"), identity.public + "\n")


def read_identity(path: Path) -> Identity:
    """Read a private key; raise `CoterieError` if it cannot be used."""
    try:
        data = path.read_bytes()
        read = serialization.load_ssh_private_key if b"OPENSSH" in data else serialization.load_pem_private_key
        key = read(data, None)
    except OSError as error:
        raise CoterieError(f"the key '{path}' cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise CoterieError(f"'{path}' is not a private key, or has a password: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CoterieError(f"'{path}' is not an elliptic curve key: make one with 'coterie flower certs'")
    return Identity(key)


def identity_at(path: Path) -> Identity:
    """Read the key in a file; generate it if there is none."""
    if not path.exists():
        write_identity(path, make_identity())
    return read_identity(path)


def verified(public: str, signature: bytes, data: bytes) -> bool:
    """Return whether the owner of the public key signed `data`."""
    try:
        key = serialization.load_ssh_public_key(public.encode())
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        key.verify(signature, data, HASH)
    except (InvalidSignature, ValueError, UnsupportedAlgorithm):
        return False
    return True


def same_key(one: str, other: str) -> bool:
    """Return whether two lines of text are the same key, ignoring comments."""
    return one.split()[:2] == other.split()[:2]


def read_keyring(folder: Path | None) -> dict[str, str]:
    """Read {name: public key} from a folder of NAME.pub files; without a folder it is empty."""
    if folder is None:
        return {}
    if not folder.is_dir():
        raise CoterieError(f"there is no folder '{folder}' of public keys (NAME.pub)")
    return {path.name.removesuffix(".pub"): path.read_text(encoding="utf-8").strip() for path in folder.glob("*.pub")}


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, from the first byte on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
