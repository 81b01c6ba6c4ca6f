"""Runs a site until it is stopped: this process is its worker, and keeps Flower's SuperNode running as its child."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.core.errors import DataError
from coterie.deploy.processes import Process, environment, free_ports, program
from coterie.deploy.settings import quoted
from coterie.deploy.worker import serve
from coterie.storage import files

RESTART_WAIT_SECONDS = (2.0, 5.0, 10.0, 20.0)  # before a SuperNode that ended is started again; the last one repeats


def run(superlink: str, ca: Path, key: Path, node: dict[str, Any], folder: Path, say: Callable[[str], None]) -> None:
    """Run the site; Ctrl-C or SIGTERM (which systemd sends) ends it."""
    if node["data"] and ":" not in node["data"] and not Path(node["data"]).is_file():
        raise DataError(f"there is no file '{node['data']}'")
    signal.signal(signal.SIGTERM, _interrupt)
    sockets = Path(tempfile.mkdtemp(prefix="coterie-"))
    keeper = SuperNodeKeeper(superlink, ca, key, {**node, "worker": sockets / "worker"}, folder, say)
    try:
        with files.private():  # the SuperNode's files, too
            serve(sockets / "worker", keeper.check, say)
    finally:
        shutil.rmtree(
            sockets, ignore_errors=True
        )  # first, as whoever stops this process may not wait for the SuperNode
        keeper.stop()


@dataclass
class SuperNodeKeeper:
    """Starts the SuperNode, and starts it again when it ends.

    After a crash, the SuperLink considers the key as still online for about a minute, and a SuperNode that it refuses
    ends.
    """

    superlink: str
    ca: Path
    key: Path
    node: dict[str, Any]
    folder: Path
    say: Callable[[str], None]
    process: Process | None = None
    ends: int = 0
    due: float = 0.0
    started: float = 0.0

    def check(self) -> None:
        """Start the SuperNode if it is not running; called about once a second."""
        now = time.monotonic()
        if self.process is None:
            if now >= self.due:
                self._start(now)
        elif not self.process.running:
            self.ends = 1 if now - self.started > 300 else self.ends + 1
            wait = RESTART_WAIT_SECONDS[min(self.ends, len(RESTART_WAIT_SECONDS)) - 1]
            self.say(f"the SuperNode ended, see '{self.process.log}'; it will be started again in {wait:g} seconds")
            if self.ends == 2 and now - self.started < 60:
                self.say(
                    f"is the SuperLink at {self.superlink} running, and has its operator registered this site's public "
                    "key (flwr supernode register)? After a crash, it accepts the same key again in about a minute"
                )
            self.process, self.due = None, now + wait

    def stop(self) -> None:
        """Stop the SuperNode."""
        if self.process is not None:
            self.process.stop()

    def _start(self, now: float) -> None:
        config = " ".join(f"{name}={quoted(str(value))}" for name, value in self.node.items() if value)
        command = [program("flower-supernode"), "--superlink", self.superlink, "--root-certificates", str(self.ca)]
        command += ["--auth-supernode-private-key", str(self.key), "--port", str(free_ports(1)[0])]
        log, env = self.folder / "supernode.log", environment(self.folder / "flower")
        self.process, self.started = Process([*command, "--node-config", config], log, env), now


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
