"""The Flower ServerApp, which runs the rounds over a Flower `Grid`. The ClientApp is in `client_app`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from coterie.core.errors import CheckpointError, ConfigError, CoterieError
from coterie.deploy import settings
from coterie.deploy.client_app import from_records, to_records
from coterie.deploy.keys import identity_at, read_identity, read_keyring
from coterie.deploy.ledger import Ledger
from coterie.deploy.processes import FOLDER
from coterie.deploy.recommend import recommend_over
from coterie.deploy.server import Server
from coterie.deploy.site import Site
from coterie.deploy.site_data import DataFunction, site_data, site_name
from coterie.deploy.wire import Envelope
from coterie.experiment.building import Model
from coterie.experiment.resolve import default_out
from coterie.storage import files
from coterie.storage.run_folder import safe_name

OTHER_SERVER_SECONDS = 60.0  # to wait for another server in the same run folder to end
MIN_PULL_SECONDS = 0.25  # between two polls for answers


def server_app(model: Model | None = None) -> ServerApp:
    """Make a Flower ServerApp for any of Coterie's methods; its settings are those of the app.

    Args:
        model: A model, or a factory (input shape, outputs) -> nn.Module; by default the one in the settings.
    """
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        run_server(grid, context.run_config, model)

    app.main()(main)
    return app


def run_server(grid: Grid, run_config: Mapping[str, Any], model: Model | None) -> None:
    """Run or resume a federation; an error is also written to error.json in the run folder."""
    if (folder := os.environ.get(FOLDER)) and folder not in sys.path:
        sys.path.append(folder)  # a user's own modules are there, as for the command that started the server
    try:
        config, method, deploy = settings.read(run_config, own_data=False, own_model=model is not None)
    except ConfigError as error:
        if wanted := str(run_config.get("deploy.out", "")):  # whoever waits for the run looks there
            Path(wanted).mkdir(parents=True, exist_ok=True)
            files.write_json(Path(wanted) / "error.json", {"error": str(error)})
        raise
    out = Path(deploy.out) if deploy.out else default_out(config)
    with files.private(), one_server(out):
        if deploy.resume:
            ledger = Ledger.load(out)
            if ledger.finished:
                raise CoterieError(f"'{out}' is already complete")
        elif (out / "deployment.json").exists():
            raise CoterieError(f"'{out}' already contains a run: continue it with 'coterie flower resume'")
        else:
            ledger = Ledger.new(deploy.federation)
        key = read_identity(Path(deploy.key)) if deploy.key else identity_at(out / "server.key")
        known = read_keyring(Path(deploy.keys) if deploy.keys else None)
        transport = FlowerTransport(grid, 2 * deploy.deadline)
        chosen = model if model is not None else config.model
        server = Server(config, method, chosen, transport, key, out, deploy.rules(), known, say)
        try:
            if deploy.panel():
                recommend_over(server, ledger, deploy)
            else:
                server.run(ledger)
        except Exception as error:
            ours = isinstance(error, CoterieError)
            text = str(error) if ours else f"{type(error).__name__}: {error} (the ServerApp's log has more)"
            with contextlib.suppress(CheckpointError):  # on a full disk, the log alone has it
                files.write_json(out / "error.json", {"error": text})
            raise
    say(f"written to {out}")


@contextlib.contextmanager
def one_server(out: Path) -> Iterator[None]:
    """Lock the run folder for one server. A server whose SuperLink was killed takes a moment to notice and end."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as file:
        until = time.monotonic() + OTHER_SERVER_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise CoterieError(f"another server is using '{out}': stop it first") from None
                time.sleep(0.5)
        yield


def make_site(run: Mapping[str, Any], node: Mapping[str, Any], model: Model | None, data: DataFunction | None) -> Site:
    """Make the site that a run's and a node's configuration describe."""
    config, method, deploy = settings.read(run, own_data=data is not None, own_model=model is not None)
    name = site_name(config, node)
    shared = Path(str(node.get("store") or os.environ.get("COTERIE_SITES", "sites")))  # shared by sites on one machine
    root = Path(str(node["folder"])) if node.get("folder") else shared / safe_name(name)
    own = site_data(config, node, name, data)
    with files.private():
        key = read_identity(Path(str(node["key"]))) if node.get("key") else identity_at(root / "site.key")
    known = read_keyring(Path(str(node["keys"])) if node.get("keys") else None)
    pinned = Path(str(node["server-key"])).read_text(encoding="utf-8").strip() if node.get("server-key") else None
    chosen = model if model is not None else config.model
    bounds = deploy.norm_bound, deploy.secure or bool(node.get("secure")), deploy.threshold
    return Site(name, config, method, chosen, own, key, root, pinned, known, *bounds)


class FlowerTransport:
    """Carries envelopes over a Flower grid; an address is a node id. A reply is matched to its message by id."""

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
        # Flower returns fewer ids than messages if it could not send some; those sites count as silent.
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
            # A failure of an old message says nothing about the one sent after it.
            if envelope is not None or serial == self.latest[address]:
                found.append((address, envelope))
        if not found:
            time.sleep(max(seconds, MIN_PULL_SECONDS))
        return found

    def now(self) -> float:
        return time.monotonic()


def from_reply(records: RecordDict) -> Envelope | None:
    """Return the envelope of a reply, or None if the node failed and replied with something else."""
    try:
        return Envelope(*from_records(records))
    except (KeyError, TypeError, AttributeError):
        return None


def say(text: str) -> None:
    """Print a line to the ServerApp's log."""
    print(f"coterie: {text}", flush=True)
