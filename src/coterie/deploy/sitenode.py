"""A site's two processes, until one of them ends or somebody stops them: its worker, and Flower's SuperNode."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from coterie.deploy.processes import Process, environment, free_ports
from coterie.deploy.up import supernode
from coterie.errors import CoterieError, DataError


def run(superlink: str, ca: Path, key: Path, node: dict[str, Any], folder: Path) -> None:
    """Blocks. Ctrl-C and SIGTERM (as systemd sends it) stop both."""
    if node["data"] and ":" not in node["data"] and not Path(node["data"]).is_file():
        raise DataError(f"there is no file '{node['data']}'")
    signal.signal(signal.SIGTERM, _interrupt)
    sockets = Path(tempfile.mkdtemp(prefix="coterie-"))
    env, started = environment(folder / "flower"), []
    try:
        worker = [sys.executable, "-m", "coterie.deploy.worker", str(sockets / "worker")]
        started.append(Process(worker, folder / "worker.log", env))
        command = supernode(superlink, ca, key, free_ports(1)[0], {**node, "worker": sockets / "worker"})
        started.append(Process(command, folder / "supernode.log", env))
        while all(process.running for process in started):
            time.sleep(1.0)
        ended = next(process for process in started if not process.running)
        raise CoterieError(f"{ended.name} ended; the end of '{ended.log}':\n{ended.tail()}")
    finally:
        for process in reversed(started):
            process.stop()
        shutil.rmtree(sockets, ignore_errors=True)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
