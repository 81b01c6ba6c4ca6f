"""The Flower ClientApp, which a SuperNode starts for every message. It is small: importing PyTorch would take longer
than most rounds.

It passes the message to the site's worker, which `coterie site` keeps running with data and model in memory. Without a
worker it imports the rest of Coterie and does the work itself.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from coterie.deploy.local_socket import ask

SignedParts = tuple[bytes, bytes, bytes]  # header, body, signature


def client_app(model: Any = None, data: Callable[[dict[str, Any]], Any] | None = None) -> ClientApp:
    """Make a Flower ClientApp for any of Coterie's methods.

    Args:
        model: A model, or a factory (input shape, outputs) -> nn.Module; by default the one in the settings.
        data: `data(node_config)` returns (inputs, targets) as tensors, or a `coterie.Federation` with this client; by
            default the node's own file, or the data set in the settings, is read.
    """
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        try:
            parts = _answer(from_records(message.content), context, model, data)
        except Exception:
            # The text of an exception must not leave the site; it goes to the site's log.
            print(traceback.format_exc(), flush=True)
            return Message(RecordDict({"coterie": ConfigRecord({"code": "failed"})}), reply_to=message)
        return Message(to_records(*parts), reply_to=message)

    app.train()(answer)
    app.query()(answer)
    return app


def _answer(parts: SignedParts, context: Context, model: Any, data: Any) -> SignedParts:
    worker = context.node_config.get("worker")
    if worker and model is None and data is None:
        try:
            return ask(str(worker), dict(context.run_config), dict(context.node_config), parts)
        except OSError:
            print(f"the worker at {worker} does not answer; doing the work in this process", flush=True)
    from coterie.deploy.flower import make_site
    from coterie.deploy.wire import Envelope

    site = make_site(context.run_config, context.node_config, model, data)
    return tuple(site.answer(Envelope(*parts)))  # type: ignore[return-value]


def to_records(header: bytes, body: bytes, signature: bytes) -> RecordDict:
    """Convert an envelope to Flower records. The body is an array of bytes, which Flower sends in chunks."""
    records = RecordDict({"coterie": ConfigRecord({"header": header, "signature": signature})})
    if body:
        records["body"] = ArrayRecord({"body": Array("uint8", (len(body),), "coterie.safetensors", body)})
    return records


def from_records(records: RecordDict) -> SignedParts:
    """Convert Flower records to an envelope; raise `KeyError` or `TypeError` if they are none."""
    head = records["coterie"]
    if not isinstance(head, ConfigRecord):
        raise TypeError("no header")
    header, signature = head["header"], head["signature"]
    body = b""
    if "body" in records:
        held = records["body"]
        if not isinstance(held, ArrayRecord):
            raise TypeError("the body is not an array")
        body = held["body"].data
    if not (isinstance(header, bytes) and isinstance(signature, bytes) and isinstance(body, bytes)):
        raise TypeError("an envelope must consist of bytes")
    return header, body, signature


__all__ = ["client_app", "from_records", "to_records"]
