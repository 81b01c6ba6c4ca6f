"""Bytes between a message's process and the site's worker, over a local socket: parts, each after its length."""

from __future__ import annotations

import json
import socket
from typing import Any

LIMIT = 2**40


def write(stream: socket.socket, parts: list[bytes]) -> None:
    for part in parts:
        stream.sendall(len(part).to_bytes(8, "big"))
        stream.sendall(part)


def read(stream: socket.socket, number: int) -> list[bytes]:
    """Raises `OSError` if the other side ends before."""
    return [_exactly(stream, min(int.from_bytes(_exactly(stream, 8), "big"), LIMIT)) for _ in range(number)]


def ask(path: str, run: dict[str, Any], node: dict[str, Any], parts: tuple[bytes, ...]) -> tuple[bytes, bytes, bytes]:
    """The worker's answer (header, body, signature)."""
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(path)
        write(stream, [json.dumps([run, node], sort_keys=True).encode(), *parts])
        header, body, signature = read(stream, 3)
        return header, body, signature


def _exactly(stream: socket.socket, size: int) -> bytes:
    pieces, missing = [], size
    while missing:
        piece = stream.recv(min(missing, 2**20))
        if not piece:
            raise ConnectionError("the other side ended")
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)
