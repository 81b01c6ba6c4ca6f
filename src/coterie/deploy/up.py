"""A whole federation on this machine: a SuperLink and SuperNodes on loopback, with TLS and keys made for the occasion.

RUN/flower/ holds what it needs: certs, the app, Flower's home, logs, and sites/, each site's own folder.
"""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.deploy import app, certs, outcome
from coterie.deploy.facts import gather
from coterie.deploy.ledger import Ledger
from coterie.deploy.processes import Process, alive, call, environment, free_ports, program, wait_for_port
from coterie.deploy.settings import quoted, refuse_device
from coterie.deploy.work import Bench
from coterie.engine import make_peers
from coterie.errors import ConfigError, CoterieError
from coterie.experiment import files
from coterie.experiment.config import read_toml
from coterie.experiment.folder import RunFolder, safe_name
from coterie.experiment.result import Result
from coterie.experiment.run import local_like
from coterie.experiment.setup import Setup
from coterie.method import Population

Watch = Callable[[dict[str, Any]], None]  # is told the table of sites, again and again
START = 60.0  # seconds for a process to answer
LOCAL = "127.0.0.1"


@dataclass
class Federation:
    """The running processes."""

    work: Path
    names: Sequence[str]
    data: str = ""  # a function package.module:name of the node's configuration; empty: the data set of the settings
    port: int = 0
    superlink: Process | None = None
    sites: dict[str, Process] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.work / "home"

    def start(self) -> None:
        certs.make(self.work / "certs", [LOCAL], self.names, days=30)
        self.start_superlink()
        for name in self.names:
            public = self.work / "certs" / "sites" / f"{safe_name(name)}.key.pub"
            self._flwr("supernode", "register", str(public), "up")
        for name in self.names:
            self.start_site(name)

    def start_superlink(self) -> None:
        self.port = free_ports(1)[0]
        place = self.work / "certs"
        shutil.rmtree(self.work / "database", ignore_errors=True)
        (self.work / "database").mkdir(parents=True)
        tls = [
            *("--ssl-ca-certfile", str(place / "ca.crt")),
            *("--ssl-certfile", str(place / "server.crt"), "--ssl-keyfile", str(place / "server.key")),
        ]
        database = ["--database", str(self.work / "database" / "superlink.db")]
        command = [program("flower-superlink"), "--host", LOCAL, "--port", str(self.port), *tls, *database]
        command += ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        self.superlink = Process(command, self.work / "logs" / "superlink.log", environment(self.home))
        wait_for_port(self.port, self.superlink, START)
        lines = ["[superlink.up]", f'address = "{LOCAL}:{self.port}"', f'root-certificates = "{place / "ca.crt"}"']
        files.write_text(self.home / "config.toml", "\n".join(lines) + "\n")

    def start_site(self, name: str) -> None:
        """As an administrator would: `coterie site`."""
        place, called = self.work / "certs", safe_name(name)
        known = ["--superlink", f"{LOCAL}:{self.port}", "--root-certificates", str(place / "ca.crt")]
        known += ["--key", str(place / "sites" / f"{called}.key"), "--keys", str(place / "keys")]
        known += ["--server-key", str(place / "server-app.key.pub")]
        own = ["--name", name, "--data", self.data, "--folder", str(self.work / "sites" / called)]
        command = [sys.executable, "-m", "coterie", "site", *known, *own]
        self.sites[name] = Process(command, self.work / "logs" / f"site-{called}.log", environment())

    def submit(self, **settings: Any) -> None:
        """Run the app; each keyword is a key of its deploy table."""
        config = " ".join(f"deploy.{key}={quoted(value)}" for key, value in settings.items())
        self._flwr("run", str(self.work / "app"), "up", "--run-config", config)

    def stop(self) -> None:
        for process in self.sites.values():
            process.ask_to_stop()
        for name in list(self.sites):
            self.stop_site(name)
        if self.superlink is not None:
            self.superlink.stop()

    def stop_site(self, name: str, *, kill: bool = False) -> None:
        process = self.sites.pop(name)
        process.kill() if kill else process.stop()

    def _flwr(self, *words: str) -> str:
        return call([program("flwr"), *words], environment(self.home))


@contextmanager
def federation(work: Path, names: Sequence[str], data: str = "") -> Iterator[Federation]:
    """Everything that was started is stopped, whatever happens."""
    running = Federation(work.resolve(), names, data)
    try:
        running.start()
        yield running
    finally:
        running.stop()


def up(setup: Setup, out: Path, deploy: dict[str, Any], watch: Watch, limit: float) -> Result:
    """Run (or, where `out` holds its ledger, go on with) a federation; its clients are sites on this machine."""
    work, names = out.resolve() / "flower", setup.federation.names
    going_on = (out / "deployment.json").exists()
    if going_on and Ledger.load(out).finished:
        raise CoterieError(f"'{out}' is complete: there is nothing to go on with")
    settings = {**local_settings(work, names, out), **deploy}
    if not (work / "app" / "pyproject.toml").exists():
        app.write(work / "app", setup.config, settings)
    for name in ("error.json", "sites.json"):  # of the server before
        (out / name).unlink(missing_ok=True)
    with federation(work, names) as running:
        running.submit(resume=going_on)
        wait(running, out, watch, limit)
    return collect(setup, out)


def local_settings(work: Path, names: Sequence[str], out: Path) -> dict[str, Any]:
    """The deploy table of an app for `federation(work, names)`: who takes part, and the keys that `start` makes."""
    place = work.resolve() / "certs"
    people = {"sites": len(names), "names": ",".join(names), "out": str(out.resolve())}
    return {**people, "key": str(place / "server-app.key"), "keys": str(place / "keys")}


def wait(running: Federation, out: Path, watch: Watch, limit: float) -> None:
    until = time.monotonic() + limit
    assert running.superlink is not None
    logs, ended = out / "flower" / "logs", False
    while time.monotonic() < until:
        ending = ended or not running.superlink.running
        if (out / "sites.json").exists():
            table = files.read_json(out / "sites.json")
            watch(table)
            if table["finished"]:
                return
            ended = not alive(table["pid"])
        if (out / "error.json").exists():
            raise CoterieError(files.read_json(out / "error.json")["error"])
        if ending:  # and said nothing in one more look
            who = "ServerApp" if running.superlink.running else "SuperLink"
            raise CoterieError(f"the {who} ended, see '{logs}'{_advice(out)}")
        time.sleep(0.5)
    raise CoterieError(f"not done within {limit:g} seconds; logs are in '{logs}'{_advice(out)}")


def _advice(out: Path) -> str:
    return f"\nGo on with: coterie flower resume {shlex.quote(str(out))}" if (out / "deployment.json").exists() else ""


def collect(setup: Setup, out: Path) -> Result:
    """The run folder as a simulation leaves it: the sites are on this machine, so their models, and what these say of
    the test examples, are at hand. Without those of a site that wrote none, it stays as the server left it."""
    ledger = Ledger.load(out)
    local = setup.with_method(local_like(setup.method)) if (out / "reference" / "rounds.jsonl").exists() else None
    reference = None
    if local is not None:
        beside = out / "reference"
        alone = RunFolder(beside).read_rounds(local.config.rounds)
        reference = outcome.conclude(local, beside, alone, ledger.best_alone, _taken(local, out, ledger, "reference"))
    records, taken = RunFolder(out).read_rounds(setup.config.rounds), _taken(setup, out, ledger, "")
    result = outcome.conclude(setup, out, records, ledger.best, taken, reference)
    if taken is not None and (reference is None or len(reference.predictions.owner)):
        outcome.complete(result, setup, out)
    return result


def _taken(setup: Setup, out: Path, ledger: Ledger, part: str) -> outcome.Taken | None:
    size = len(setup.federation.names)
    people = Population(size, setup.config.participants(size), setup.task)
    bench = Bench(setup.config, setup.method, gather(setup.config, ledger.declared), setup.federation, setup.task, None)
    form = bench.view_form(people)
    found = []
    for name in setup.federation.names:
        place = out / "flower" / "sites" / safe_name(name) / safe_name(ledger.run) / safe_name(name) / "result" / part
        if not (place / "predictions.safetensors").exists():
            return None
        found.append(outcome.read_taken(place, name, form))
    return outcome.together(found)


def part_of(setup: Setup, sites: int | Sequence[str]) -> Setup:
    """The same run with some clients only: the first `sites`, or those named."""
    whole = setup.federation
    if problems := refuse_device(setup.config):
        raise ConfigError(problems)
    if isinstance(sites, int) and not 1 <= sites <= len(whole.names):
        raise ConfigError([f"--sites {sites}: {setup.config.data} has {len(whole.names)} clients"])
    names = whole.names[:sites] if isinstance(sites, int) else sites
    some = dataclasses.replace(whole, clients={name: whole.clients[name] for name in names})
    return dataclasses.replace(
        setup, federation=some, peers=make_peers(setup.config.topology, some.names, setup.config.seed)
    )


def app_config(folder: Path) -> dict[str, Any]:
    """The flat settings of an app, as Flower would give them."""
    table = read_toml(folder / "pyproject.toml")["tool"]["flwr"]["app"]["config"]
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
    return flat
