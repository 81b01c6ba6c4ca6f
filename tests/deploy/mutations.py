"""Messages that a hostile site or server could send: real ones, changed in their bytes or in what they say."""

from __future__ import annotations

import json
import random
from typing import Any

from coterie.deploy.wire import Envelope

HOSTILE: list[Any] = [
    None, True, False, -1, 0, 1, 2, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 1e300, -1e300, float("nan"),
    float("inf"), "", "a", "d", "server", "x" * 300, "\ud800", "\u0000", "../../x", "CON", "<script>alert(1)</script>",
    "=1+1", [], {}, [[]], [None], [1, "a", "late"], {"a": {}}, {"__metadata__": {}}, [0] * 2000, "[" * 5000,
]  # fmt: skip


HEADERS = ("bytes", "unsigned", "header", "header", "header", "header")  # what is said, and not what is sent
KINDS = (*HEADERS, "table", "table", "data")


def mutated(envelope: Envelope, signer: str, draw: random.Random, kinds: tuple[str, ...] = KINDS) -> Envelope:
    """Change an envelope; most are signed again, so that more than the signature has to notice."""
    from .inprocess import IDENTITIES, forged  # which needs POSIX; JSON values are changed anywhere

    kind = draw.choice(kinds)
    if kind == "bytes":
        parts = [_bytes(part, draw) if draw.random() < 0.5 else part for part in envelope]
        return Envelope(*parts)
    if kind == "unsigned":
        header = _bytes(envelope.header, draw)
        return Envelope(header, envelope.body, IDENTITIES[signer].sign(header))
    header, body = json.loads(envelope.header), envelope.body
    if kind == "header":
        for _ in range(draw.choice((1, 1, 1, 2, 5))):
            header = changed(header, draw)
        if not isinstance(header, dict):
            data = json.dumps(header).encode()
            return Envelope(data, body, IDENTITIES[signer].sign(data))
    else:
        body = mutated_body(body, draw, table=kind == "table")
    return forged(header, body, signer)


def mutated_body(body: bytes, draw: random.Random, *, table: bool) -> bytes:
    """Change the table of contents of a body, or its data."""
    size = int.from_bytes(body[:8], "little")
    if not 0 < size <= len(body) - 8:
        return _bytes(body, draw)
    head, data = body[8 : 8 + size], body[8 + size :]
    if table and draw.random() < 0.5:
        head = json.dumps(changed(json.loads(head), draw)).encode()
    elif table:
        head = _bytes(head, draw)
    else:
        at = draw.randrange(len(data) // 4 + 1) * 4
        data = data[:at] + draw.choice((b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f")) + data[at + 4 :]
    length = len(head) if draw.random() < 0.9 else draw.choice((0, 2**40, 2**63, len(head) + 1))
    return length.to_bytes(8, "little") + head + data


def changed(value: Any, draw: random.Random) -> Any:
    """Change one place in a JSON value."""
    inside = [*value] if isinstance(value, dict) else [*range(len(value))] if isinstance(value, list) else []
    if not inside or draw.random() < 0.15:
        return draw.choice(HOSTILE)
    at = draw.choice(inside)
    copy = value.copy()
    what = draw.random()
    if what < 0.1:
        del copy[at]
    elif what < 0.2 and isinstance(copy, dict):
        copy[draw.choice(("extra", "<b>", "\ud800", "v", "kind", "x" * 400))] = draw.choice(HOSTILE)
    elif what < 0.3 and isinstance(copy, list):
        copy *= draw.choice((2, 100))
    else:
        copy[at] = changed(value[at], draw)
    return copy


def _bytes(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    some = draw.randbytes(draw.choice((1, 1, 2, 16)))
    return draw.choice(
        (
            data[:at] + some + data[at + len(some) :],
            data[:at] + some + data[at:],
            data[:at] + data[at + len(some) :],
            data[:at],
            data[:at] + data[at // 2 :],
            b"",
        )
    )
