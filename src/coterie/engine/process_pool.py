"""Worker processes: forked copies of this process that share its work.

A worker is a fork, so it has the model, the data and the compiled steps already. Only what changes from call to call is
sent to it, as a tree of tensors in shared memory, and its result comes back the same way. This process works too. Which
process takes which piece of work changes nothing. There is no pickle.

A worker knows the functions that were in use when it was forked. When another function is wanted, or the inputs have
another structure, the workers are replaced by new ones. Workers end when this process does.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from coterie import profiling
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.tree import Tree
from coterie.core.user_code import explain
from coterie.engine.shared_message import SharedMessage

Work = Callable[[Tree], Tree]
SLOTS_PER_WORKER = 2  # the piece of work that it does, and one that lies ready
KNOWN_FUNCTIONS = 9  # that workers are made with: those that were used last
_SLOT_NUMBER = struct.Struct("i")


def can_fork() -> bool:
    """Tell whether this system can have worker processes: forking is safe beside numerical libraries on Linux only."""
    return sys.platform.startswith("linux")


class Slot(NamedTuple):
    """Where one piece of work waits, or is being done."""

    request: SharedMessage
    reply: SharedMessage


class KnownFunction(NamedTuple):
    """A function that the workers have, and the structure of its inputs."""

    key: object
    work: Work
    like: Tree  # the structure; its tensors are empty
    names: tuple[str, ...]  # of the leaves


class ProcessPool:
    """Applies functions to trees of tensors, in this process and in forked ones.

    Args:
        workers: how many processes work, including this one.
        slots: how many pieces of work can be with the forked processes at a time.
    """

    def __init__(self, workers: int, slots: int | None = None) -> None:
        self._owner = os.getpid()
        self._forks = workers - 1
        self._slot_count = SLOTS_PER_WORKER * self._forks if slots is None else slots
        self._known: list[KnownFunction] = []
        self._workers: dict[int, int] = {}  # the process id of each, by the pipe that it reports to
        self._slots: list[Slot] = []
        self._sink = self._source = -1  # the pipe with the numbers of slots whose work nobody has begun

    @profiling.timed("workers")
    def map(self, key: object, work: Work, inputs: Sequence[Callable[[], Tree]]) -> list[Tree]:
        """Apply `work` to every input.

        Args:
            key: stands for `work`: equal keys mean that workers which know the one function may use it for the other.
            work: the function. Its results must all have the same structure.
            inputs: functions that make the inputs; they are called in this process, when the input is needed.

        Returns:
            The results in the order of the inputs. They hold until the next call: a worker's results are shown where
            it wrote them.

        Raises:
            CoterieError: a worker failed (its traceback is in the message), or it was killed.
        """
        try:
            return self._map(key, work, inputs)
        except BaseException:
            self.close()
            raise

    def _map(self, key: object, work: Work, inputs: Sequence[Callable[[], Tree]]) -> list[Tree]:
        done: dict[int, Tree] = {}
        last = len(inputs) - 1
        waiting = deque(range(last))
        value = inputs[last]()
        busy: dict[int, int] = {}  # which input is in a slot
        known = self._find(key, value)
        if known is None:  # steps are compiled here, once, and not in every worker
            done[last] = work(value)
            known = self.fork(key, work, value)
        else:  # a worker begins before this process prepares anything for itself
            busy[0] = last
            self._send(0, known, value)
        free = [slot for slot in range(len(self._slots)) if slot not in busy]
        while len(done) < len(inputs):
            own = waiting.popleft() if waiting else None
            while waiting and free:
                slot = free.pop()
                busy[slot] = waiting.popleft()
                self._send(slot, known, inputs[busy[slot]]())
            if own is None and (slot_back := self._take_back()) is not None:
                own = busy.pop(slot_back)
                free.append(slot_back)
            if own is not None:
                done[own] = work(inputs[own]())
            nothing_else = bool(busy) and not waiting and not self._work_waits()
            for slot in self._finished(wait=nothing_else):
                done[busy.pop(slot)] = self._result(slot, next(iter(done.values())), copied=bool(waiting))
                free.append(slot)
        return [done[number] for number in range(len(inputs))]

    def fork(self, key: object, work: Work, example: Tree) -> KnownFunction:
        """Replace the workers by new ones that know `work` too, and that have all that this process has now.

        Args:
            key: stands for `work`, as in `map`.
            work: the function.
            example: an input; only its structure counts.
        """
        self.close()
        known = KnownFunction(key, work, tree.map(lambda leaf: leaf.new_empty(0), example), _names(example))
        others = [each for each in self._known if each.key != key]
        self._known = [*others[1 - KNOWN_FUNCTIONS :], known]
        self._slots = [Slot(SharedMessage(), SharedMessage()) for _ in range(self._slot_count)]
        source, self._sink = os.pipe()
        try:
            # The workers wait when they read this pipe. This process does not, so it opens the pipe once more.
            self._source = os.open(f"/proc/self/fd/{source}", os.O_RDONLY | os.O_NONBLOCK)
            for number in range(1, self._forks + 1):
                self._fork_one(source, number)
        finally:
            os.close(source)
        return known

    def _fork_one(self, source: int, number: int) -> None:
        report, reported = os.pipe()
        with _interrupts_blocked(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # "fork() may deadlock": see can_fork
            try:
                child = os.fork()
            except OSError as error:
                os.close(report)
                os.close(reported)
                raise CoterieError(f"a worker process cannot be started ({error}): try fewer --workers") from error
            if child == 0:
                try:
                    for file in (self._sink, self._source, report, *self._workers):
                        os.close(file)
                    self._serve(source, reported, number)
                finally:
                    os._exit(0)
            self._workers[report] = child
        os.close(reported)

    def _serve(self, source: int, reported: int, number: int) -> None:
        """Do a worker's work until this pool is closed. Ctrl-C stays blocked: the parent ends its workers."""
        while token := os.read(source, _SLOT_NUMBER.size):
            request, reply = self._slots[_SLOT_NUMBER.unpack(token)[0]]
            error, spans, results = "", None, list[Tensor]()
            try:
                about, values = request.read()
                profiling.begin_worker(number, about["spans"])
                known = self._known[about["known"]]
                results = tree.leaves(known.work(_filled(known.like, values)))
                spans = profiling.taken()
            except BaseException as raised:
                error = "\n".join(filter(None, [explain(raised), traceback.format_exc()]))  # the user's line first
            reply.write({"error": error, "spans": spans}, results)
            os.write(reported, token)

    def _find(self, key: object, value: Tree) -> KnownFunction | None:
        if not self._workers:
            return None
        names = _names(value)
        return next((each for each in self._known if each.key == key and each.names == names), None)

    def _send(self, slot: int, known: KnownFunction, value: Tree) -> None:
        about = {"known": self._known.index(known), "spans": profiling.around()}
        self._slots[slot].request.write(about, tree.leaves(value))
        os.write(self._sink, _SLOT_NUMBER.pack(slot))

    def _take_back(self) -> int | None:
        """Return a slot whose work nobody had begun, and now nobody will; None if there is none."""
        try:
            token = os.read(self._source, _SLOT_NUMBER.size)
        except BlockingIOError:
            return None
        return int(_SLOT_NUMBER.unpack(token)[0])

    def _work_waits(self) -> bool:
        return bool(select.select([self._source], [], [], 0)[0])

    def _finished(self, wait: bool) -> list[int]:
        """Return the slots whose results are there; with `wait`, there is at least one."""
        ready, _, _ = select.select(list(self._workers), [], [], None if wait else 0)
        slots = []
        for report in ready:
            token = os.read(report, _SLOT_NUMBER.size)
            if not token:
                self._raise_death(report)
            slots.append(int(_SLOT_NUMBER.unpack(token)[0]))
        return slots

    def _result(self, slot: int, like: Tree, copied: bool) -> Tree:
        """Return the result in a slot; `copied` if its memory may be used again before the result is."""
        about, values = self._slots[slot].reply.read()
        if about["error"]:
            raise CoterieError("a worker process failed:\n" + about["error"])
        if about["spans"]:
            profiling.add(about["spans"])
        if copied:
            keys = [(value.data_ptr(), value.shape, value.dtype) for value in values]
            own = {key: value.clone() for key, value in zip(keys, values, strict=True)}  # what was one tensor still is
            values = [own[key] for key in keys]
        return _filled(like, values)

    def _raise_death(self, report: int) -> None:
        child = self._workers.pop(report)
        os.close(report)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        memory = " (out of memory?)" if code == -signal.SIGKILL else ""
        how = f"was killed by signal {-code}{memory}" if code < 0 else f"ended with code {code}"
        raise CoterieError(f"a worker process {how}: try fewer --workers or less --memory")

    def close(self) -> None:
        """End the workers, whatever they are doing. The pool can be used again: it then makes new ones."""
        for report, child in self._workers.items():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            os.close(report)
        for file in (self._sink, self._source):
            if file >= 0:
                os.close(file)
        for slot in self._slots:
            slot.request.close()
            slot.reply.close()
        self._workers, self._slots, self._sink, self._source = {}, [], -1, -1

    def __del__(self) -> None:
        if os.getpid() == self._owner:  # a fork's copy of a pool is not its own
            self.close()


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Let Ctrl-C wait until the end of the block, so that no worker is forked and then forgotten.

    A fork never comes to the end of the block: it is blocked there for good.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _names(value: Tree) -> tuple[str, ...]:
    return tuple(tree.pack(value))


def _filled(like: Tree, values: Sequence[Tensor]) -> Tree:
    """Return the structure of `like` with these leaves."""
    leaves = iter(values)
    return tree.map(lambda _: next(leaves), like)
