"""Flower carries the envelopes: a ServerApp that runs the rounds over a `Grid`. The ClientApp is in `coterie_site`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from coterie.deploy import settings
from coterie.deploy.keys import identity_at, read_identity, read_keyring
from coterie.deploy.ledger import Ledger
from coterie.deploy.server import Server
from coterie.deploy.site import Site
from coterie.deploy.sitedata import DataFunction, site_data, site_name
from coterie.deploy.wire import Envelope
from coterie.errors import CoterieError
from coterie.experiment import files
from coterie.experiment.config import default_out
from coterie.experiment.folder import safe_name
from coterie.experiment.setup import Model
from coterie_site import from_records, to_records

LEAVING = 60.0  # seconds for another server in the same run folder to end
PULL = 0.25  # seconds between looks for answers, at least


def server_app(model: Model | None = None) -> ServerApp:
    """A Flower ServerApp for any of Coterie's methods; its settings are the app's. `model`: a network or a factory of
    one, (input shape, outputs) -> nn.Module; by default the one that the settings name."""
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        run_server(grid, context.run_config, model)

    app.main()(main)
    return app


def run_server(grid: Grid, run_config: Mapping[str, Any], model: Model | None) -> None:
    config, method, deploy = settings.read(run_config, own_data=False, own_model=model is not None)
    out = Path(deploy.out) if deploy.out else default_out(config)
    with only_one(out):
        if deploy.resume:
            ledger = Ledger.load(out)
            if ledger.finished:
                raise CoterieError(f"'{out}' is complete: there is nothing to go on with")
        elif (out / "deployment.json").exists():
            raise CoterieError(f"'{out}' holds a run already: 'coterie flower resume' goes on with it")
        else:
            ledger = Ledger.new(deploy.federation)
        key = read_identity(Path(deploy.key)) if deploy.key else identity_at(out / "server.key")
        known = read_keyring(Path(deploy.keys) if deploy.keys else None)
        transport = Carrier(grid, 2 * deploy.deadline)
        chosen = model if model is not None else config.model
        server = Server(config, method, chosen, transport, key, out, deploy.rules(), known, say)
        try:
            server.run(ledger)
        except Exception as error:
            ours = isinstance(error, CoterieError)
            told = str(error) if ours else f"{type(error).__name__}: {error} (the ServerApp's log has more)"
            files.write_json(out / "error.json", {"error": told})
            raise
    say(f"written to {out}")


@contextlib.contextmanager
def only_one(out: Path) -> Iterator[None]:
    """One server at a time in a run folder. One whose SuperLink was killed takes a moment to notice, and to end."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as file:
        until = time.monotonic() + LEAVING
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise CoterieError(f"another server is at work in '{out}': stop it first") from None
                time.sleep(0.5)
        yield


def make_site(run: Mapping[str, Any], node: Mapping[str, Any], model: Model | None, data: DataFunction | None) -> Site:
    config, method, deploy = settings.read(run, own_data=data is not None, own_model=model is not None)
    name = site_name(config, node)
    shared = Path(str(node.get("store") or os.environ.get("COTERIE_SITES", "sites")))  # by sites on one machine
    root = Path(str(node["folder"])) if node.get("folder") else shared / safe_name(name)
    own = site_data(config, node, name, data)
    key = read_identity(Path(str(node["key"]))) if node.get("key") else identity_at(root / "site.key")
    known = read_keyring(Path(str(node["keys"])) if node.get("keys") else None)
    pinned = Path(str(node["server-key"])).read_text(encoding="utf-8").strip() if node.get("server-key") else None
    chosen = model if model is not None else config.model
    return Site(name, config, method, chosen, own, key, root, pinned, known, deploy.norm_bound)


class Carrier:
    """Envelopes over a Flower grid; an address is a node id. Answers are matched by the message they reply to."""

    def __init__(self, grid: Grid, ttl: float) -> None:
        self.grid, self.ttl = grid, ttl
        self.open: dict[str, tuple[str, int]] = {}  # {message id: (address, serial)}
        self.latest: dict[str, int] = {}  # {address: serial of the last message}

    def addresses(self) -> set[str]:
        return {str(node) for node in self.grid.get_node_ids()}

    def post(self, letters: Mapping[str, Envelope]) -> None:
        messages = []
        for address, envelope in letters.items():
            kind = "query" if b'"kind":"join"' in envelope.header else "train"
            messages.append(Message(to_records(*envelope), int(address), kind, ttl=self.ttl))
        # Flower gives fewer ids than messages where it could not send: those sites are as good as silent.
        for address, message_id in zip(letters, self.grid.push_messages(messages), strict=False):
            self.latest[address] = self.latest.get(address, 0) + 1
            if message_id:
                self.open[message_id] = (address, self.latest[address])

    def poll(self, seconds: float) -> list[tuple[str, Envelope | None]]:
        found: list[tuple[str, Envelope | None]] = []
        for reply in self.grid.pull_messages(list(self.open)) if self.open else ():
            address, serial = self.open.pop(reply.metadata.reply_to_message_id, ("", 0))
            if not address:
                continue
            envelope = None if reply.has_error() else from_reply(reply.content)
            # That an old message found nobody says nothing about the one sent after it.
            if envelope is not None or serial == self.latest[address]:
                found.append((address, envelope))
        if not found:
            time.sleep(max(seconds, PULL))
        return found

    def now(self) -> float:
        return time.monotonic()


def from_reply(records: RecordDict) -> Envelope | None:
    """None where a node answered with something else: it is a node that failed."""
    try:
        return Envelope(*from_records(records))
    except (KeyError, TypeError, AttributeError):
        return None


def say(text: str) -> None:
    print(f"coterie: {text}", flush=True)
