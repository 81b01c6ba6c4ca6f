"""Checks messages before they are used. A check that fails raises `Refused`.

The header has the run, its `life` (how often the server has started), the round, sender, receiver, and the digest of
the body. The header is signed. A body is read only if the header is valid.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from coterie.core import tree
from coterie.core.tree import Tree
from coterie.deploy import keys, wire
from coterie.deploy.keys import Identity
from coterie.deploy.refused import Refused
from coterie.deploy.wire import Envelope
from coterie.evaluation.metrics import BETTER
from coterie.methods.fields import AnyMethod

SERVER = "server"  # no site may have this name
VERSION = 1
MAX_HEADER_BYTES = 4 * 2**20
HEADER_FIELDS = {"v": int, "run": str, "life": int, "round": int, "from": str, "to": str, "kind": str, "body": str}


def sign_envelope(header: dict[str, Any], body: bytes, identity: Identity) -> Envelope:
    """Make a signed envelope, with the digest of the body in its header."""
    whole = {"v": VERSION, **header, "body": wire.digest(body)}
    data = json.dumps(whole, separators=(",", ":")).encode()
    return Envelope(data, body, identity.sign(data))


def read_header(envelope: Envelope) -> dict[str, Any]:
    """Parse the header, without verifying the signature."""
    if len(envelope.header) > MAX_HEADER_BYTES:
        raise Refused("bad-header", f"a header of {len(envelope.header)} bytes")
    try:
        header = json.loads(envelope.header)
    except (ValueError, RecursionError) as error:
        raise Refused("bad-header") from error
    if not isinstance(header, dict) or any(type(header.get(key)) is not kind for key, kind in HEADER_FIELDS.items()):
        raise Refused("bad-header", "a required field is missing")
    if header["v"] != VERSION:
        raise Refused("bad-header", f"protocol version {header['v']} instead of {VERSION}")
    return header


def verify(envelope: Envelope, header: dict[str, Any], public: str) -> None:
    """Check that the owner of the key signed the header, and that the body has the signed digest."""
    if not keys.verified(public, envelope.signature, envelope.header):
        raise Refused("bad-signature")
    if wire.digest(envelope.body) != header["body"]:
        raise Refused("bad-signature", "the body is not the one that was signed")


def open_body(envelope: Envelope, like: Tree) -> Tree:
    """Decode the body, which must have the names, shapes and types of `like`."""
    if len(envelope.body) > wire.limit(like):
        raise Refused("too-large", f"{len(envelope.body)} bytes, but at most {wire.limit(like)} are possible")
    return wire.decode(envelope.body, like)


def check_message(method: AnyMethod, up: Tree, examples: int, norm_bound: float) -> None:
    """Check that a client's message is finite, plausible for its number of examples, and below the norm bound."""
    check_finite(up)
    impossible = method.implausible(up, examples)
    if impossible is not None:
        raise Refused("bad-count", impossible)
    check_norm(up, norm_bound)


def check_norm(content: Tree, norm_bound: float) -> None:
    """Check that the norm of all floating-point values together is not above the bound."""
    floats = (leaf for leaf in tree.leaves(content) if leaf.is_floating_point())
    norm = math.sqrt(sum(float((leaf.double() ** 2).sum()) for leaf in floats))
    if norm > norm_bound:
        raise Refused("norm", f"a norm of {norm:.3g}, above the bound {norm_bound:g}")


def check_combines(method: AnyMethod, server: Tree, index: int, up: Tree) -> None:
    """Check that the method can aggregate the message of client `index`; a failure later would stop the federation."""
    try:
        new = method.aggregate(server, torch.tensor([index]), tree.stack([up]))
    except Exception as error:
        raise Refused("unusable", f"the method cannot combine it: {error}") from error
    check_finite(new)


def check_finite(content: Tree) -> None:
    """Check that no value is NaN or infinite."""
    for path, leaf in tree.pack(content).items():
        if not bool(torch.isfinite(leaf).all()):
            raise Refused("not-finite", f"'{path}' has NaN or infinite values")


def check_metrics(metrics: Any) -> dict[str, dict[str, float]]:
    """Check and return the metrics in the header of an answer, {part: {metric: number}}."""
    parts = {"validation", "test", "global_validation", "global_test"}
    if not isinstance(metrics, dict) or not metrics.keys() <= parts:
        raise Refused("bad-header", "metrics of unknown parts")
    for by in metrics.values():
        if not isinstance(by, dict) or not by.keys() <= BETTER.keys() or not all(_number(v) for v in by.values()):
            raise Refused("bad-header", "metrics that are not numbers")
    return metrics


def _number(value: Any) -> bool:
    return type(value) in (int, float) and not math.isinf(value)
