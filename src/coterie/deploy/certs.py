"""Makes what machines identify each other by: a CA, the server's certificate, and a key pair for every site."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coterie.core.errors import CoterieError
from coterie.deploy.keys import make_identity, write_identity, write_private
from coterie.storage import files
from coterie.storage.run_folder import safe_name

PEM = serialization.Encoding.PEM
LOOPBACK_NAMES = ("127.0.0.1", "localhost")  # by which the SuperLink's own processes and its operator reach it
Key = ec.EllipticCurvePrivateKey


def make(out: Path, hosts: Sequence[str], sites: Sequence[str], days: int) -> dict[str, list[Path]]:
    """Write the files that do not exist yet; return what was written, by recipient:

    ca.crt             for everybody                    ca.key             for nobody; keep it offline
    server.crt, .key   for the SuperLink                server-app.key     for the ServerApp, which signs with it
    sites/NAME.key     for the site NAME only           sites/NAME.key.pub for the operator of the SuperLink
    keys/NAME.pub      all sites' public keys: for the ServerApp and, among peers, for the sites
    """
    written: dict[str, list[Path]] = {"everybody": [], "the server": [], "nobody": []}
    ca_key, ca = _authority(out, days, written)
    if not (out / "server.crt").exists():
        key = ec.generate_private_key(ec.SECP384R1())
        _write_key(out / "server.key", key)
        names = list(dict.fromkeys([*hosts, *LOOPBACK_NAMES]))
        _write_certificate(out / "server.crt", _server(key, ca_key, ca, names, days))
        written["the server"] += [out / "server.key", out / "server.crt"]
    if not (out / "server-app.key").exists():
        write_identity(out / "server-app.key", make_identity())
        written["the server"].append(out / "server-app.key")
        written["everybody"].append(out / "server-app.key.pub")
    for name in sites:
        path = out / "sites" / f"{safe_name(name)}.key"
        if path.exists():
            continue
        identity = make_identity()
        write_identity(path, identity)
        files.write_text(out / "keys" / f"{safe_name(name)}.pub", identity.public + "\n")
        written[f"site {name}"] = [path]
    return written


def _authority(out: Path, days: int, written: dict[str, list[Path]]) -> tuple[Key, x509.Certificate]:
    if (out / "ca.crt").exists():
        try:
            key = serialization.load_pem_private_key((out / "ca.key").read_bytes(), None)
            certificate = x509.load_pem_x509_certificate((out / "ca.crt").read_bytes())
        except (OSError, ValueError) as error:
            raise CoterieError(
                f"the CA in '{out}' cannot be read, so it cannot sign new certificates: {error}"
            ) from error
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return key, certificate
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Coterie federation CA")])
    certificate = (
        _builder(name, name, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    _write_key(out / "ca.key", key)
    _write_certificate(out / "ca.crt", certificate)
    written["everybody"].append(out / "ca.crt")
    written["nobody"].append(out / "ca.key")
    return key, certificate


def _server(key: Key, ca_key: Key, ca: x509.Certificate, hosts: Sequence[str], days: int) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    return (
        _builder(name, ca.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )


def _builder(subject: x509.Name, issuer: x509.Name, key: Key, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_key(path: Path, key: Key) -> None:
    data = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    files.write(path, lambda temporary: write_private(temporary, data))


def _write_certificate(path: Path, certificate: x509.Certificate) -> None:
    files.write_text(path, certificate.public_bytes(PEM).decode())
