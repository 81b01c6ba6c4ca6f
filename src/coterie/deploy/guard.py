"""What must be true of a message before anything is done with it. All that fails raises `Refused`.

The header says who says what to whom: run, `life` (how often the server has started), round, sender, receiver, and the
digest of the body; the signature is over the header. A body is looked at only when the header is right.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from coterie import tree
from coterie.deploy import keys, wire
from coterie.deploy.keys import Identity
from coterie.deploy.refused import Refused
from coterie.deploy.wire import Envelope
from coterie.evaluation.metrics import BETTER
from coterie.hyper import AnyMethod
from coterie.tree import Tree

SERVER = "server"  # no site may be called that
VERSION = 1
HEADER_LIMIT = 4 * 2**20
ROUTE = {"v": int, "run": str, "life": int, "round": int, "from": str, "to": str, "kind": str, "body": str}


def seal_header(header: dict[str, Any], body: bytes, identity: Identity) -> Envelope:
    """An envelope with the body's digest in its header, signed."""
    whole = {"v": VERSION, **header, "body": wire.digest(body)}
    data = json.dumps(whole, separators=(",", ":")).encode()
    return Envelope(data, body, identity.sign(data))


def read_header(envelope: Envelope) -> dict[str, Any]:
    """The header, not verified yet."""
    if len(envelope.header) > HEADER_LIMIT:
        raise Refused("bad-header", f"a header of {len(envelope.header)} bytes")
    try:
        header = json.loads(envelope.header)
    except (ValueError, RecursionError) as error:
        raise Refused("bad-header") from error
    if not isinstance(header, dict) or any(type(header.get(key)) is not kind for key, kind in ROUTE.items()):
        raise Refused("bad-header", "run, round, sender, receiver or kind are missing")
    if header["v"] != VERSION:
        raise Refused("bad-header", f"version {header['v']} of the protocol, not {VERSION}")
    return header


def verify(envelope: Envelope, header: dict[str, Any], public: str) -> None:
    """The header is what the owner of the key signed, and the body is the one it speaks of."""
    if not keys.verified(public, envelope.signature, envelope.header):
        raise Refused("bad-signature")
    if wire.digest(envelope.body) != header["body"]:
        raise Refused("bad-signature", "the body is not the one that was signed")


def open_body(envelope: Envelope, like: Tree) -> Tree:
    if len(envelope.body) > wire.limit(like):
        raise Refused("too-large", f"{len(envelope.body)} bytes where at most {wire.limit(like)} are possible")
    return wire.decode(envelope.body, like)


def check_message(method: AnyMethod, up: Tree, examples: int, norm_bound: float) -> None:
    """A client's message: finite, nothing that a client with so many examples cannot say, a norm below the bound."""
    check_finite(up)
    impossible = method.implausible(up, examples)
    if impossible is not None:
        raise Refused("bad-count", impossible)
    floats = (leaf for leaf in tree.leaves(up) if leaf.is_floating_point())
    norm = math.sqrt(sum(float((leaf.double() ** 2).sum()) for leaf in floats))
    if norm > norm_bound:
        raise Refused("norm", f"a norm of {norm:.3g}, above the bound {norm_bound:g}")


def check_combines(method: AnyMethod, server: Tree, index: int, up: Tree) -> None:
    """Client `index`'s message does not break the server: what does would stop the federation for everybody."""
    try:
        new = method.aggregate(server, torch.tensor([index]), tree.stack([up]))
    except Exception as error:
        raise Refused("unusable", f"the method cannot combine it: {error}") from error
    check_finite(new)


def check_finite(content: Tree) -> None:
    for path, leaf in tree.pack(content).items():
        if not bool(torch.isfinite(leaf).all()):
            raise Refused("not-finite", f"'{path}' holds NaN or infinite values")


def check_metrics(metrics: Any) -> dict[str, dict[str, float]]:
    """{part: {metric: number}}, as an answer's header has them."""
    parts = {"validation", "test", "global_validation", "global_test"}
    if not isinstance(metrics, dict) or not metrics.keys() <= parts:
        raise Refused("bad-header", "metrics of unknown parts")
    for by in metrics.values():
        if not isinstance(by, dict) or not by.keys() <= BETTER.keys() or not all(_number(v) for v in by.values()):
            raise Refused("bad-header", "metrics that are not numbers")
    return metrics


def _number(value: Any) -> bool:
    return type(value) in (int, float) and not math.isinf(value)
