"""Starts Flower's processes on this machine with time limits, and stops them by their ids."""

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

from coterie.core.errors import CoterieError

FOLDER = "COTERIE_FOLDER"  # the variable that tells the ServerApp where the command began
FLOWER_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def program(name: str) -> str:
    """Return the path of a Flower command, beside this Python or on PATH; raise `CoterieError` if there is none."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise CoterieError(f"there is no command '{name}': pip install 'coterie[flower]'")
    return found


def environment(home: Path | None = None, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which Flower's commands find each other, and the same Coterie as this process."""
    here = str(Path(sys.executable).parent)
    source = str(Path(__file__).parents[2])
    values = {**os.environ, **FLOWER_ENVIRONMENT, "PATH": os.pathsep.join([here, os.environ.get("PATH", "")])}
    values[FOLDER] = os.getcwd()
    values["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    return {**values, **({"FLWR_HOME": str(home)} if home else {}), **(more or {})}


def free_ports(number: int) -> list[int]:
    """Return port numbers that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Process:
    """A command in its own process group, with its output in a file."""

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
        """Ask the process to stop, without waiting; call `stop` afterwards."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def stop(self, seconds: float = 8.0) -> None:
        """Stop the process and all its descendants: first by SIGTERM, then by SIGKILL."""
        family = descendants(self.pid)
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self._end(family)

    def kill(self) -> None:
        """Kill the process and all its descendants at once, as if the machine had failed."""
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
        """Return the last lines of the output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _end_with_parent() -> None:
    """Make Linux send this process SIGTERM when its parent dies."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def wait_for_port(port: int, process: Process, seconds: float) -> None:
    """Wait until the process listens on a port; raise `CoterieError` if it ends or takes too long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not process.running:
            raise CoterieError(
                f"{process.name} ended right after its start; the last lines of '{process.log}':\n{process.tail()}"
            )
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
            return
        time.sleep(0.1)
    raise CoterieError(f"{process.name} did not answer within {seconds:g} seconds; see '{process.log}'")


def call(command: Sequence[str], env: Mapping[str, str], seconds: float = 120.0, cwd: Path | None = None) -> str:
    """Run a command and return its output; raise `CoterieError` with the output if it fails."""
    try:
        done = subprocess.run(
            command, env=dict(env), cwd=cwd, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CoterieError(f"'{' '.join(command[:4])} ...' did not finish within {seconds:g} seconds") from error
    if done.returncode:
        raise CoterieError(f"'{' '.join(command[:4])} ...' failed:\n{(done.stdout + done.stderr).strip()[-2000:]}")
    return done.stdout


def descendants(pid: int) -> list[tuple[int, int]]:
    """Return (id, start time) of all descendants of a process."""
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
    """Return whether a process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _born(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError):
        return -1
