"""Jobs that are done once, shared out among forked copies of this process (a round's work has a `Team`).

Each worker has all that this process has, takes the next job until none is left, and writes the result to a scratch
folder in memory. This process works too. There is no pickle, and which worker takes which job changes nothing.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import struct
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from coterie import spans, tree
from coterie.errors import CoterieError
from coterie.processor import cores
from coterie.tree import Tree

_TOKEN = struct.Struct("i")


def can_fork() -> bool:
    """Forking after numerical libraries have started is safe on Linux only."""
    return sys.platform.startswith("linux")


Do = Callable[[Sequence[Callable[[], None]]], None]  # does jobs that change nothing but files


def all_done(jobs: Sequence[Callable[[], None]]) -> None:
    """Such jobs, in as many processes as there are cores."""

    def said(job: Callable[[], None]) -> Tensor:
        job()
        return torch.zeros(0)

    if len(jobs) > 1 and can_fork():
        fan_out([functools.partial(said, job) for job in jobs], cores())
    else:
        for job in jobs:
            job()


@spans.timed("workers")
def fan_out(jobs: Sequence[Callable[[], Tree]], workers: int) -> list[Tree]:
    """The results of all jobs, in order. This process is one of the workers and always takes the first job."""
    scratch = Path(tempfile.mkdtemp(prefix="coterie-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    children: list[int] = []
    source, sink = os.pipe()
    try:
        for place in range(1, min(workers, len(jobs))):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # "fork() may deadlock": see can_fork
                child = os.fork()
            if child == 0:
                os.close(sink)
                _work(jobs, source, scratch, place)
            children.append(child)
        # Workers that failed leave their jobs to the others and are found in _wait; so the pipe always has a reader.
        for number in range(1, len(jobs)):
            os.write(sink, _TOKEN.pack(number))
        os.close(sink)
        sink = -1
        done = {0: jobs[0]()}
        while number := _next(source):
            done[number] = jobs[number]()
        _wait(children, scratch)
        for recorded in sorted(scratch.glob("spans-*")):
            spans.add(recorded.read_text())
        return [
            done[number] if number in done else tree.rebuild(load_file(scratch / f"{number}.safetensors"), done[0])
            for number in range(len(jobs))
        ]
    finally:
        os.close(source)
        if sink >= 0:
            os.close(sink)
        for child in children:
            _stop(child)
        shutil.rmtree(scratch, ignore_errors=True)


def _work(jobs: Sequence[Callable[[], Tree]], source: int, scratch: Path, place: int) -> None:
    """A worker's whole life; never returns."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
        spans.begin_worker(place)
        while number := _next(source):
            result = jobs[number]()
            with spans.span("workers"):
                save_file(tree.separate(tree.pack(result)), scratch / f"{number}.safetensors")
        if recorded := spans.taken():
            (scratch / f"spans-{place}.json").write_text(recorded)
        code = 0
    except BaseException:
        (scratch / f"error-{os.getpid()}.txt").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _wait(children: list[int], scratch: Path) -> None:
    while children:
        child, status = os.waitpid(children[0], 0)
        children.remove(child)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            raise CoterieError(
                f"a worker process was killed by signal {-code}"
                f"{' (out of memory?)' if code == -signal.SIGKILL else ''}: try fewer --workers or less --memory"
            )
        if code > 0:
            raise CoterieError("a worker process failed:\n" + "".join(p.read_text() for p in scratch.glob("error-*")))


def _stop(child: int) -> None:
    try:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        return


def _next(source: int) -> int:
    """The next job's number, or 0 when none is left (job 0 is never in the pipe)."""
    token = os.read(source, _TOKEN.size)
    return int(_TOKEN.unpack(token)[0]) if token else 0
