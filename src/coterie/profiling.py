"""A timer of named spans, which nest, tells where the time went.

    with recording() as profile:            without it, a span costs a look at one variable
        with span("train", round=3): ...    or, for a whole function, @timed("train")
    profile.table()                         the seconds of each name, without those of the spans inside
    profile.trace()                         as JSON, for chrome://tracing or ui.perfetto.dev

A forked worker continues to record where its parent was, and hands over what it added (`taken`, `add`). The clock is
the machine's, so the spans of all processes lie on one time axis.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

WORK = ("train", "evaluate")  # what a round is for
ORDER = ("prepare", "choose", "dispatch", "gather", *WORK, "aggregate", "write", "workers", "finish", "report", "other")
MEANING = {
    "prepare": "read the data, build the model",
    "choose": "measure engines, compile",
    "dispatch": "make what the clients are sent",
    "gather": "fetch states, draw minibatches, put results in order",
    "train": "local updates",
    "evaluate": "what views are made of, their outputs, metrics",
    "aggregate": "check and combine what the clients said",
    "write": "checkpoints, models, records",
    "workers": "start processes, wait for them, fetch their results",
    "finish": "benefit over training alone, summary",
    "report": "report.html",
    "other": "everything else",
}


class Span(NamedTuple):
    """A piece of time with a name; times are in nanoseconds."""

    name: str
    start: int
    length: int
    own: int  # without the spans inside
    process: int  # 0: this one; else a worker's number
    about: dict[str, Any]  # such as the round; it includes what the spans around this one say


class Row(NamedTuple):
    """The time of all spans of one name."""

    name: str
    seconds: float  # in this process
    elsewhere: float  # in the workers, added up
    share: float  # of the time of all processes


@dataclass
class Profile:
    """What was recorded."""

    spans: list[Span] = field(default_factory=list)
    process: int = 0
    _open: list[_Open] = field(default_factory=list, repr=False)

    def table(self, *, run: str | None = None, rounds: bool = False, first: int = 1) -> list[Row]:
        """Add up the own time of spans by name, in the order of `ORDER`.

        Args:
            run: only of the run of this method.
            rounds: only of rounds.
            first: the first round that counts.
        """
        inside = [
            span
            for span in self.spans
            if (run is None or span.about.get("run") == run) and (not rounds or span.about.get("round", -1) >= first)
        ]
        times: dict[str, list[int]] = {}
        for span in inside:
            name = span.name if span.name in ORDER else "other"
            times.setdefault(name, [0, 0])[span.process > 0] += span.own
        total = sum(map(sum, times.values())) or 1
        return [Row(n, times[n][0] / 1e9, times[n][1] / 1e9, sum(times[n]) / total) for n in ORDER if n in times]

    def share_of_work(self, *, run: str | None = None, first: int = 1) -> float:
        """Return the share of the rounds' time, in all processes, that is local training and evaluation."""
        return sum(row.share for row in self.table(run=run, rounds=True, first=first) if row.name in WORK)

    def trace(self) -> dict[str, Any]:
        """Return the profile in the trace-event format.

        Spans are complete events ("X"), in microseconds from the beginning; workers are processes.
        """
        begin = min((span.start for span in self.spans), default=0)
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": _process(number)}}
            for number in sorted({span.process for span in self.spans})
        ]
        events += [
            {
                "ph": "X",
                "name": span.name,
                "cat": "coterie",
                "ts": (span.start - begin) / 1e3,
                "dur": span.length / 1e3,
                "pid": span.process,
                "tid": 0,
                "args": span.about,
            }
            for span in sorted(self.spans, key=lambda span: (span.start, -span.length))
        ]
        return {"displayTimeUnit": "ms", "traceEvents": events}


class _Open:
    """A span that has begun."""

    def __init__(self, profile: Profile, name: str, about: dict[str, Any]) -> None:
        self._profile, self._name, self._about = profile, name, about
        self.about, self.inner = about, 0

    def __enter__(self) -> None:
        stack = self._profile._open
        if stack:
            self.about = {**stack[-1].about, **self._about} if self._about else stack[-1].about
        stack.append(self)
        self._start = time.perf_counter_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        length = time.perf_counter_ns() - self._start
        profile, stack = self._profile, self._profile._open
        if stack and stack[-1] is self:
            stack.pop()
        elif self in stack:
            del stack[stack.index(self) :]
        else:  # a loop that was left by an exception ends after what was around it
            return
        if stack:
            stack[-1].inner += length
        own = max(length - self.inner, 0)
        profile.spans.append(Span(self._name, self._start, length, own, profile.process, self.about))


_current: Profile | None = None
_OFF = contextlib.nullcontext()


@contextlib.contextmanager
def recording(enabled: bool = True) -> Iterator[Profile | None]:
    """Record the spans of the block.

    Yields the profile; None if not `enabled`, or inside of another recording, which then has the spans.
    """
    global _current
    if not enabled or _current is not None:
        yield None
        return
    _current = Profile()
    try:
        with span("all"):
            yield _current
    finally:
        _current = None


def span(name: str, **about: Any) -> contextlib.AbstractContextManager[None]:
    """Return a block whose time is recorded under `name`, with what is known `about` it (such as the round)."""
    return _OFF if _current is None else _Open(_current, name, about)


def timed(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make every call of a function a span."""

    def decorate(fn: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(fn)
        def inside(*args: P.args, **kwargs: P.kwargs) -> T:
            with span(name):
                return fn(*args, **kwargs)

        return inside

    return decorate


def each(name: str, items: Iterable[T]) -> Iterator[T]:
    """Yield the items; what the loop does with each is a span, which says which item it was."""
    for item in items:
        with span(name, **{name: item}):
            yield item


def around() -> dict[str, Any] | None:
    """Return what the spans around here say (such as the round); None if nothing is recorded."""
    return None if _current is None else dict(_current._open[-1].about) if _current._open else {}


def begin_worker(number: int, about: dict[str, Any] | None = None) -> None:
    """Record for a worker from now on; to be called in a fork.

    Args:
        number: the worker's number.
        about: what the spans around its work say; None: what they said when it was forked.
    """
    if _current is not None:
        _current.process, _current.spans = number, []
        if about is not None:
            _current._open[:] = [_Open(_current, "all", about)]


def beside(times: list[list[int]]) -> None:
    """Record what threads did in the innermost span.

    The work of the other threads becomes spans of the same name; the time that this thread waited for them becomes a
    span of workers.

    Args:
        times: when each thread began and ended, in nanoseconds, this one first.
    """
    if _current is None or not _current._open or len(times) < 2:
        return
    around, end = _current._open[-1], time.perf_counter_ns()
    (_, own), last = times[0], max(times, key=lambda each: each[1])[1]
    for number, (start, stop) in enumerate(times[1:], 1):
        _current.spans.append(Span(around._name, end - last + start, stop - start, stop - start, number, around.about))
    waited = max(last - own, 0)
    around.inner += waited
    _current.spans.append(Span("workers", end - waited, waited, waited, _current.process, around.about))


def taken() -> str | None:
    """Return what a fork has recorded, as JSON; None if nothing is recorded."""
    return None if _current is None else json.dumps(_current.spans)


def add(recorded: str) -> None:
    """Add what a worker has recorded."""
    if _current is not None:
        _current.spans += [Span(*values) for values in json.loads(recorded)]


def _process(number: int) -> str:
    return f"worker {number}" if number else "this process"
