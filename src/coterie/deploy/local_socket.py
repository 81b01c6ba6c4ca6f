"""Passes messages to the site's worker over a local socket, as byte strings that follow their lengths."""

from __future__ import annotations

import json
import socket
from typing import Any

MAX_PART_BYTES = 2**40


def write(stream: socket.socket, parts: list[bytes]) -> None:
    """Send byte strings."""
    for part in parts:
        stream.sendall(len(part).to_bytes(8, "big"))
        stream.sendall(part)


def read(stream: socket.socket, number: int) -> list[bytes]:
    """Receive `number` byte strings; raise `OSError` if the other side closes the connection."""
    return [_receive(stream, min(int.from_bytes(_receive(stream, 8), "big"), MAX_PART_BYTES)) for _ in range(number)]


def ask(path: str, run: dict[str, Any], node: dict[str, Any], parts: tuple[bytes, ...]) -> tuple[bytes, bytes, bytes]:
    """Send an envelope to the worker; return its answer (header, body, signature)."""
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(path)
        write(stream, [json.dumps([run, node], sort_keys=True).encode(), *parts])
        header, body, signature = read(stream, 3)
        return header, body, signature


def _receive(stream: socket.socket, size: int) -> bytes:
    pieces, missing = [], size
    while missing:
        piece = stream.recv(min(missing, 2**20))
        if not piece:
            raise ConnectionError("the other side closed the connection")
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)
