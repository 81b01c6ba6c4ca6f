"""Let functions take turns: each in a thread of its own, until it asks its engine for something.

No two of them compute at once. When all have asked, the main thread answers what they asked for as one piece of work
(`take_turns`), and then lets them continue.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple, cast

from coterie.data.federation import Federation
from coterie.engine import ClientRunner, Rows
from coterie.engine.engine import Results
from coterie.experiment.pick_engine import RunStart, Work


class Jobs(NamedTuple):
    """Ask for jobs that only write files; those of all runs are done together."""

    jobs: Sequence[Callable[[], None]]


Request = RunStart | Work | Jobs


class RunEnd(NamedTuple):
    """Report that a function has ended, with a result or an error."""

    result: Any
    error: BaseException | None = None


class RunThread(ClientRunner):
    """Call a function in a thread of its own, when it is its turn.

    To the function, this object is its engine: it passes each request on to the main thread and waits for the answer.
    """

    def __init__(self, work: Callable[[RunThread], Any], number: int) -> None:
        self.number = number  # how many share the time
        self._requests: SimpleQueue[Request | RunEnd] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run, work), daemon=True)
        self._thread.start()

    def engine(self, start: RunStart) -> ClientRunner:
        """Wait until the engine of all runs has been picked; return what this run uses in its place."""
        self._ask(start)
        return self

    def map(
        self,
        fn: Callable[..., Any],
        federation: Federation,
        ids: Sequence[int],
        rows_of: Callable[[list[int]], Rows],
        purpose: str,
    ) -> Results:
        """Ask for the work of `Engine.map`, and wait for its results."""
        return cast(Results, self._ask(Work(fn, federation, ids, rows_of, purpose)))

    def do(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Ask for jobs that write files, and wait until they are done."""
        own = [functools.partial(contextvars.copy_context().run, job) for job in jobs]  # another thread calls them
        self._ask(Jobs(own))

    def advance(self, answer: Any) -> Request | RunEnd:
        """Let the run continue with the answer to its last request, until its next request or its end."""
        self._answers.put(answer)
        return self._requests.get()

    def _ask(self, request: Request) -> Any:
        self._requests.put(request)
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _run(self, work: Callable[[RunThread], Any]) -> None:
        self._answers.get()  # until it is this thread's turn
        try:
            end = RunEnd(work(self))
        except BaseException as error:
            end = RunEnd(None, error)
        self._requests.put(end)


def take_turns(
    works: Sequence[Callable[[RunThread], Any]], answer: Callable[[Sequence[Request | RunEnd]], list[Any]]
) -> list[Any]:
    """Call all functions in turns. Whatever stops one of them, such as Ctrl-C, is raised in all.

    Args:
        works: the functions; each is given its engine.
        answer: answers a request of each of them, but for those that have ended.

    Returns:
        What they return, in order.
    """
    threads = [RunThread(work, len(works)) for work in works]
    stop = Interrupt()
    asked: list[Request | RunEnd] = []
    answers: list[Any] = [None] * len(threads)
    error: BaseException | None = None  # the first; the others then end with it, too
    while True:
        with stop.postponed():
            turns = zip(threads, asked or threads, answers, strict=True)
            asked = [each if isinstance(each, RunEnd) else thread.advance(given) for thread, each, given in turns]
        ends = [each for each in asked if isinstance(each, RunEnd)]
        error = error or next((end.error for end in ends if end.error), None)
        if len(ends) == len(asked):
            break
        try:
            stop.deliver()
            answers = [error] * len(threads) if error else answer(asked)
        except BaseException as raised:  # each run writes a checkpoint before it ends
            answers = [raised] * len(threads)
    if error:
        raise error
    stop.deliver()
    return [end.result for end in ends]


class Interrupt:
    """Postpone Ctrl-C until all runs have made a request, since it must not come between their turns."""

    def __init__(self) -> None:
        self._usual = signal.getsignal(signal.SIGINT)
        self._mine = threading.current_thread() is threading.main_thread() and callable(self._usual)
        self._came: list[tuple[int, Any]] = []

    @contextlib.contextmanager
    def postponed(self) -> Iterator[None]:
        """Hold back Ctrl-C in this context."""
        if not self._mine:
            yield
            return
        signal.signal(signal.SIGINT, lambda *came: self._came.append(came))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._usual)

    def deliver(self) -> None:
        """Do now what would have been done when Ctrl-C came, if it did."""
        if self._came and callable(self._usual):
            self._usual(*self._came.pop())
