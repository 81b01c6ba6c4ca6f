"""Processes of Flower on this machine: started with time limits, and stopped by their ids."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from coterie.errors import CoterieError

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def program(name: str) -> str:
    """A command of Flower's, beside this Python or on the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise CoterieError(f"there is no command '{name}': pip install 'coterie[flower]'")
    return found


def environment(home: Path | None = None, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Flower's commands find each other on the path, and Coterie where this process found it."""
    here = str(Path(sys.executable).parent)
    source = str(Path(__file__).parents[2])
    values = {**os.environ, **QUIET, "PATH": os.pathsep.join([here, os.environ.get("PATH", "")])}
    values["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    return {**values, **({"FLWR_HOME": str(home)} if home else {}), **(more or {})}


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Process:
    """A command in a process group of its own, with its output in a file."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str], cwd: Path | None = None) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self.name = log, Path(command[0]).name
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def ask_to_stop(self) -> None:
        """Without waiting; `stop` comes after."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def stop(self, seconds: float = 8.0) -> None:
        """Politely, then not; with all that it started, each by its id."""
        family = descendants(self.pid)
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self._end(family)

    def kill(self) -> None:
        """At once: as a machine dies."""
        self._end(descendants(self.pid))

    def _end(self, family: list[tuple[int, int]]) -> None:
        if self.running:
            self.process.kill()
            self.process.wait()
        for pid, born in family:
            if _born(pid) == born:  # still the same process
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def tail(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _end_with_parent() -> None:
    """Linux: where the process that started this one is killed, this one is asked to stop."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def wait_for_port(port: int, process: Process, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not process.running:
            raise CoterieError(f"{process.name} ended at its start; the end of '{process.log}':\n{process.tail()}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
            return
        time.sleep(0.1)
    raise CoterieError(f"{process.name} does not answer within {seconds:g} seconds; see '{process.log}'")


def call(command: Sequence[str], env: Mapping[str, str], seconds: float = 120.0, cwd: Path | None = None) -> str:
    """A command's output; raises with it if the command fails."""
    try:
        done = subprocess.run(
            command, env=dict(env), cwd=cwd, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CoterieError(f"'{' '.join(command[:4])} ...' did not end within {seconds:g} seconds") from error
    if done.returncode:
        raise CoterieError(f"'{' '.join(command[:4])} ...' failed:\n{(done.stdout + done.stderr).strip()[-2000:]}")
    return done.stdout


def descendants(pid: int) -> list[tuple[int, int]]:
    """(id, time of birth) of all processes that a process started, and those they started."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, todo = [], list(children.get(pid, []))
    while todo:
        each = todo.pop()
        found.append((each, _born(each)))
        todo += children.get(each, [])
    return found


def alive(pid: int) -> bool:
    """Whether a process is there and has not ended (one that nobody has asked for its end is still listed)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _born(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError):
        return -1
