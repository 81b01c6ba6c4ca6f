"""Runs a whole federation on this machine: a SuperLink and SuperNodes on loopback, with new certificates and keys.

RUN/flower/ contains its certificates, the app, Flower's home, logs, and sites/ with each site's own folder.
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

from coterie.core.errors import ConfigError, CoterieError
from coterie.core.method import Population
from coterie.core.toml import read_toml
from coterie.deploy import app, certs, outcome
from coterie.deploy.federation_facts import gather_facts
from coterie.deploy.ledger import Ledger
from coterie.deploy.processes import Process, alive, call, environment, free_ports, program, wait_for_port
from coterie.deploy.settings import AVERAGE, quoted, refuse_of_simulation
from coterie.deploy.work import Workbench
from coterie.engine import make_peers
from coterie.experiment import stopping
from coterie.experiment.conclude import write_tables
from coterie.experiment.execute import local_like
from coterie.experiment.privacy.install import Installed
from coterie.experiment.result import Result
from coterie.experiment.setup import Setup
from coterie.storage import files
from coterie.storage.run_folder import RunFolder, safe_name

Watch = Callable[[dict[str, Any]], None]  # receives the table of sites repeatedly
START_SECONDS = 60.0  # until a process must answer
LOOPBACK = "127.0.0.1"


@dataclass
class LocalFederation:
    """The processes of a federation on this machine."""

    work: Path
    names: Sequence[str]
    data: str = ""  # a data function package.module:name; empty: the data set of the settings
    port: int = 0
    superlink: Process | None = None
    sites: dict[str, Process] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.work / "home"

    def start(self) -> None:
        """Make certificates, and start the SuperLink and all sites."""
        certs.make(self.work / "certs", [LOOPBACK], self.names, days=30)
        self.start_superlink()
        for name in self.names:
            public = self.work / "certs" / "sites" / f"{safe_name(name)}.key.pub"
            self._flwr("supernode", "register", str(public), "up")
        for name in self.names:
            self.start_site(name)

    def start_superlink(self) -> None:
        """Start the SuperLink with an empty database, and wait until it answers."""
        self.port = free_ports(1)[0]
        place = self.work / "certs"
        shutil.rmtree(self.work / "database", ignore_errors=True)
        (self.work / "database").mkdir(parents=True)
        tls = [
            *("--ssl-ca-certfile", str(place / "ca.crt")),
            *("--ssl-certfile", str(place / "server.crt"), "--ssl-keyfile", str(place / "server.key")),
        ]
        database = ["--database", str(self.work / "database" / "superlink.db")]
        command = [program("flower-superlink"), "--host", LOOPBACK, "--port", str(self.port), *tls, *database]
        command += ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        self.superlink = Process(command, self.work / "logs" / "superlink.log", environment(self.home))
        wait_for_port(self.port, self.superlink, START_SECONDS)
        lines = ["[superlink.up]", f'address = "{LOOPBACK}:{self.port}"', f'root-certificates = "{place / "ca.crt"}"']
        files.write_text(self.home / "config.toml", "\n".join(lines) + "\n")

    def start_site(self, name: str) -> None:
        """Start a site as an administrator would, with `coterie site`."""
        place, called = self.work / "certs", safe_name(name)
        known = ["--superlink", f"{LOOPBACK}:{self.port}", "--root-certificates", str(place / "ca.crt")]
        known += ["--key", str(place / "sites" / f"{called}.key"), "--keys", str(place / "keys")]
        known += ["--server-key", str(place / "server-app.key.pub")]
        own = ["--name", name, "--data", self.data, "--folder", str(self.work / "sites" / called)]
        command = [sys.executable, "-m", "coterie", "site", *known, *own]
        self.sites[name] = Process(command, self.work / "logs" / f"site-{called}.log", environment())

    def submit(self, **settings: Any) -> None:
        """Submit the app; each keyword is a key of its deploy table."""
        config = " ".join(f"deploy.{key}={quoted(value)}" for key, value in settings.items())
        self._flwr("run", str(self.work / "app"), "up", "--run-config", config)

    def stop(self) -> None:
        """Stop all processes."""
        for process in self.sites.values():
            process.ask_to_stop()
        for name in list(self.sites):
            self.stop_site(name)
        if self.superlink is not None:
            self.superlink.stop()

    def stop_site(self, name: str, *, kill: bool = False) -> None:
        """Stop a site or, with `kill`, kill it as if its machine had failed."""
        process = self.sites.pop(name)
        process.kill() if kill else process.stop()

    def _flwr(self, *words: str) -> str:
        return call([program("flwr"), *words], environment(self.home))


@contextmanager
def local_federation(work: Path, names: Sequence[str], data: str = "") -> Iterator[LocalFederation]:
    """Start a federation, and stop all its processes at the end of the block."""
    running = LocalFederation(work.resolve(), names, data)
    try:
        running.start()
        yield running
    finally:
        running.stop()


def up(setup: Setup, out: Path, deploy: dict[str, Any], watch: Watch, limit: float) -> Result:
    """Run a federation whose clients are sites on this machine, or resume it if `out` has its ledger.

    Args:
        setup: The setup of the run.
        out: The run folder.
        deploy: Keys of the app's deploy table.
        watch: Called with the table of sites while the run continues.
        limit: Seconds after which to give up.

    Raises:
        CoterieError: A process ended early, the server failed, or the time is up.
    """
    with files.private():
        _run(setup, out, deploy, watch, limit)
        return collect(setup, out)


def recommend_up(setup: Setup, out: Path, deploy: dict[str, Any], watch: Watch, limit: float) -> None:
    """Recommend a method to sites on this machine, or go on with that; arguments and errors are those of `up`.

    `deploy` names the panel (deploy.recommend). What was found is in `out`, as `coterie recommend` writes it.
    """
    with files.private():
        _run(setup, out, deploy, watch, limit)


def _run(setup: Setup, out: Path, deploy: dict[str, Any], watch: Watch, limit: float) -> None:
    work, names = out.resolve() / "flower", setup.federation.names
    resuming = (out / "deployment.json").exists()
    if resuming and Ledger.load(out).finished:
        raise CoterieError(f"'{out}' is already complete")
    settings = {**local_settings(work, names, out), **deploy}
    for name in ("error.json", "sites.json"):  # of the previous server
        (out / name).unlink(missing_ok=True)
    if not (work / "app" / "pyproject.toml").exists():
        app.write(work / "app", setup.config, settings)
    with local_federation(work, names) as running:
        running.submit(resume=resuming)
        wait(running, out, watch, limit)


def local_settings(work: Path, names: Sequence[str], out: Path) -> dict[str, Any]:
    """Return the deploy table of an app for `local_federation(work, names)`: its sites and keys."""
    place = work.resolve() / "certs"
    people = {"sites": len(names), "names": ",".join(names), "out": str(out.resolve())}
    return {**people, "key": str(place / "server-app.key"), "keys": str(place / "keys")}


def wait(running: LocalFederation, out: Path, watch: Watch, limit: float) -> None:
    """Wait until the run is finished; raise `CoterieError` if it fails or takes too long."""
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
        if ending:  # and there was no message in one more look
            who = "ServerApp" if running.superlink.running else "SuperLink"
            raise CoterieError(f"the {who} ended, see '{logs}'{_advice(out)}")
        time.sleep(0.5)
    raise CoterieError(f"the run did not finish within {limit:g} seconds; logs are in '{logs}'{_advice(out)}")


def _advice(out: Path) -> str:
    return f"\nTo continue: coterie flower resume {shlex.quote(str(out))}" if (out / "deployment.json").exists() else ""


def collect(setup: Setup, out: Path) -> Result:
    """Complete the run folder as a simulation would, with the models and predictions in the sites' folders.

    If a site has not written its results, the folder stays as the server wrote it.
    """
    ledger = Ledger.load(out)
    stopped = stopping.read(out)
    local = setup.with_method(local_like(setup.method)) if (out / "reference" / "rounds.jsonl").exists() else None
    reference = None
    if local is not None:
        beside = out / "reference"
        alone = RunFolder(beside).read_rounds(local.config.rounds)
        found, ended = _read_results(local, out, ledger, "reference"), stopping.read(beside)
        reference = outcome.conclude(local, beside, alone, ledger.best_alone, found, stopped=ended)
        write_tables(reference, beside)
    records, results = RunFolder(out).read_rounds(setup.config.rounds), _read_results(setup, out, ledger, "")
    result = outcome.conclude(setup, out, records, ledger.best, results, reference, stopped=stopped)
    if results is not None and (reference is None or len(reference.predictions.owner)):
        outcome.complete(result, setup, out)
    else:
        write_tables(result, out)
    return result


def _read_results(setup: Setup, out: Path, ledger: Ledger, part: str) -> outcome.SiteResults | None:
    size = len(setup.federation.names)
    people = Population(size, setup.config.participants(size), setup.task)
    facts, unguarded = gather_facts(setup.config, ledger.declared), Installed(setup.method)
    workbench = Workbench(setup.config, setup.method, facts, setup.federation, setup.task, None, unguarded)
    form = workbench.view_form(people)
    found = []
    for name in setup.federation.names:
        place = out / "flower" / "sites" / safe_name(name) / safe_name(ledger.run) / safe_name(name) / "result" / part
        if not (place / "predictions.safetensors").exists():
            return None
        found.append(outcome.read_site_results(place, name, form))
    return outcome.merge_site_results(found)


def part_of(setup: Setup, sites: int | Sequence[str]) -> Setup:
    """Return the same setup with fewer clients: the first `sites`, or those named."""
    whole = setup.federation
    if problems := refuse_of_simulation(setup.config):
        raise ConfigError(problems)
    if isinstance(sites, int) and not 1 <= sites <= len(whole.names):
        raise ConfigError([f"--sites {sites}: {setup.config.data} has {len(whole.names)} clients"])
    names = whole.names[:sites] if isinstance(sites, int) else sites
    some = dataclasses.replace(whole, clients={name: whole.clients[name] for name in names})
    config, budget = setup.config.model_copy(update={"average": setup.config.average or AVERAGE}), setup.budget
    if budget is not None and config.epsilon is not None:
        # That noise is for a simulation of all clients; each site finds its own, to spend no more than epsilon.
        epsilon, config = config.epsilon, config.model_copy(update={"noise": None})
        budget = dataclasses.replace(budget, epsilons=dict.fromkeys(names, epsilon))
    peers = make_peers(config.topology, some.names, config.seed)
    return dataclasses.replace(setup, config=config, federation=some, peers=peers, budget=budget)


def app_config(folder: Path) -> dict[str, Any]:
    """Read the settings of an app as a flat table, like the one that Flower provides."""
    table = read_toml(folder / "pyproject.toml")["tool"]["flwr"]["app"]["config"]
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
    return flat
