"""A site, until it is stopped: this process is its worker, and looks after Flower's SuperNode, its only child."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.deploy.processes import Process, environment, free_ports, program
from coterie.deploy.settings import quoted
from coterie.deploy.worker import serve
from coterie.errors import DataError

WAITS = (2.0, 5.0, 10.0, 20.0)  # seconds until a SuperNode that ended is started again; then the last


def run(superlink: str, ca: Path, key: Path, node: dict[str, Any], folder: Path, say: Callable[[str], None]) -> None:
    """Blocks. Ctrl-C and SIGTERM (as systemd sends it) end it."""
    if node["data"] and ":" not in node["data"] and not Path(node["data"]).is_file():
        raise DataError(f"there is no file '{node['data']}'")
    signal.signal(signal.SIGTERM, _interrupt)
    sockets = Path(tempfile.mkdtemp(prefix="coterie-"))
    keeper = Keeper(superlink, ca, key, {**node, "worker": sockets / "worker"}, folder, say)
    try:
        serve(sockets / "worker", keeper.look, say)
    finally:
        shutil.rmtree(sockets, ignore_errors=True)  # first: who stops this process may not wait for the SuperNode
        keeper.stop()


@dataclass
class Keeper:
    """Starts the SuperNode, again and again if need be: after a crash, the SuperLink takes the same key for already
    online for a minute or so, and a SuperNode that is refused ends."""

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

    def look(self) -> None:
        now = time.monotonic()
        if self.process is None:
            if now >= self.due:
                self._start(now)
        elif not self.process.running:
            self.ends = 1 if now - self.started > 300 else self.ends + 1
            wait = WAITS[min(self.ends, len(WAITS)) - 1]
            self.say(f"the SuperNode ended, see '{self.process.log}'; it is started again in {wait:g} seconds")
            if self.ends == 2 and now - self.started < 60:
                self.say(
                    f"is the SuperLink at {self.superlink} running, and has its operator registered this site's public "
                    "key (flwr supernode register)? After a crash here, it lets the same key in again in about a minute"
                )
            self.process, self.due = None, now + wait

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()

    def _start(self, now: float) -> None:
        told = " ".join(f"{name}={quoted(str(value))}" for name, value in self.node.items() if value)
        command = [program("flower-supernode"), "--superlink", self.superlink, "--root-certificates", str(self.ca)]
        command += ["--auth-supernode-private-key", str(self.key), "--port", str(free_ports(1)[0])]
        log, env = self.folder / "supernode.log", environment(self.folder / "flower")
        self.process, self.started = Process([*command, "--node-config", told], log, env), now


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
