"""What a SuperNode starts for every message, kept small: importing PyTorch for each would cost more than most rounds.

It hands the message to the site's worker (`coterie site` keeps one running, with data and model in memory), which
answers; without one it imports Coterie and does the work itself. A package of its own, because importing anything
under `coterie` imports PyTorch.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from coterie_site.parts import ask

Parts = tuple[bytes, bytes, bytes]  # header, body, signature


def client_app(model: Any = None, data: Callable[[dict[str, Any]], Any] | None = None) -> ClientApp:
    """A Flower ClientApp for any of Coterie's methods.

    `model`: a network, or a factory of one, (input shape, outputs) -> nn.Module; by default the one that the settings
    name. `data(node_config)` gives (inputs, targets) as tensors, or a `coterie.Federation` with this client in it; by
    default the node's own file, or the data set that the settings name.
    """
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        try:
            parts = _answer(from_records(message.content), context, model, data)
        except Exception:
            # The text of an exception would travel; it stays in the log of the site.
            print(traceback.format_exc(), flush=True)
            return Message(RecordDict({"coterie": ConfigRecord({"code": "failed"})}), reply_to=message)
        return Message(to_records(*parts), reply_to=message)

    app.train()(answer)
    app.query()(answer)
    return app


def _answer(parts: Parts, context: Context, model: Any, data: Any) -> Parts:
    worker = context.node_config.get("worker")
    if worker and model is None and data is None:
        try:
            return ask(str(worker), dict(context.run_config), dict(context.node_config), parts)
        except OSError:
            print(f"the worker at {worker} does not answer: working here", flush=True)
    from coterie.deploy.flower import make_site
    from coterie.deploy.wire import Envelope

    site = make_site(context.run_config, context.node_config, model, data)
    return tuple(site.answer(Envelope(*parts)))  # type: ignore[return-value]


def to_records(header: bytes, body: bytes, signature: bytes) -> RecordDict:
    """The body as an array of bytes, so that Flower sends it in pieces if it is large."""
    records = RecordDict({"coterie": ConfigRecord({"header": header, "signature": signature})})
    if body:
        records["body"] = ArrayRecord({"body": Array("uint8", (len(body),), "coterie.safetensors", body)})
    return records


def from_records(records: RecordDict) -> Parts:
    """Raises `KeyError` or `TypeError` if they are no envelope."""
    head = records["coterie"]
    if not isinstance(head, ConfigRecord):
        raise TypeError("no header")
    header, signature = head["header"], head["signature"]
    body = b""
    if "body" in records:
        held = records["body"]
        if not isinstance(held, ArrayRecord):
            raise TypeError("the body is no array")
        body = held["body"].data
    if not (isinstance(header, bytes) and isinstance(signature, bytes) and isinstance(body, bytes)):
        raise TypeError("an envelope is made of bytes")
    return header, body, signature


__all__ = ["client_app", "from_records", "to_records"]
