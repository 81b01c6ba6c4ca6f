"""Learning-rate schedules: what the optimiser's step size is multiplied by, round by round or step by step.

With t the rounds that are done (and, step by step, the part of this one that is), and R the rounds of the run:

    constant    f(t) = value                                                            (`Constant`)
    step        f(t) = factor^floor(t / every)                                          (`Step`)
    cosine      f(t) = least + (1 - least) (1 + cos(pi t / R)) / 2                      (`Cosine`)
    warmup      f(t) = start + (1 - start) t / rounds, and after `rounds` rounds        (`Warmup`)
                that of `then` as if it began there, with t - rounds of R - rounds

These are the values that the classes of `torch.optim.lr_scheduler` have after t calls of `step` (tested). A schedule of
your own is a function `f(t, R)`, or a frozen dataclass that extends `Schedule`; its fields are options. The pace of a
step is f at the rounds that are done before its round or, with `per` = step, before it.

What a client trains when its model is made ready for use (`Method.personalize`) has no schedule: at the end of a cosine
there would be nothing left to fine-tune with.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from coterie.core.errors import ConfigError
from coterie.core.user_code import in_user_code

Function = Callable[[float, float], float]  # (t, R) -> what the step size is multiplied by
Per = Annotated[Literal["round", "step"], Field(description="whether it changes with every round, or step")]


class Schedule(ABC):
    """A function of time whose options are fields: a subclass is a frozen dataclass."""

    per: Literal["round", "step"] = "round"

    @abstractmethod
    def __call__(self, t: float, rounds: float) -> float:
        """Return what the step size is multiplied by.

        Args:
            t: the rounds that are done, from 0; within a round with `per` = step, with the share of its steps that are.
            rounds: the rounds of the run.
        """


@dataclass(frozen=True)
class Constant(Schedule):
    """The same all the time."""

    value: Annotated[float, Field(ge=0, description="what the step size is multiplied by")] = 1.0

    def __call__(self, t: float, rounds: float) -> float:
        return self.value


@dataclass(frozen=True)
class Step(Schedule):
    """Down by a factor every so many rounds."""

    every: Annotated[float, Field(gt=0, description="rounds between two changes")] = 10.0
    factor: Annotated[float, Field(gt=0, description="what each change multiplies by")] = 0.5
    per: Per = "round"

    def __call__(self, t: float, rounds: float) -> float:
        return float(self.factor ** math.floor(t / self.every))


@dataclass(frozen=True)
class Cosine(Schedule):
    """From 1 down to `least` along half a cosine."""

    least: Annotated[float, Field(ge=0, le=1, description="where it ends, as a share of the step size")] = 0.0
    per: Per = "round"

    def __call__(self, t: float, rounds: float) -> float:
        return self.least + (1 - self.least) * (1 + math.cos(math.pi * t / rounds)) / 2


@dataclass(frozen=True)
class Warmup(Schedule):
    """Up from `start` to 1 along a line, and then another schedule."""

    rounds: Annotated[float, Field(gt=0, description="rounds until the whole step size is reached")] = 5.0
    start: Annotated[float, Field(ge=0, le=1, description="share of the step size at first")] = 0.1
    per: Per = "round"
    then: Schedule = Constant()

    def __call__(self, t: float, rounds: float) -> float:
        if t < self.rounds:
            return self.start + (1 - self.start) * t / self.rounds
        return self.then(t - self.rounds, rounds - self.rounds)


SCHEDULES: dict[str, type[Schedule]] = {"constant": Constant, "step": Step, "cosine": Cosine, "warmup": Warmup}


@dataclass(frozen=True)
class Pacing:
    """A schedule for a run of so many rounds."""

    schedule: Function
    rounds: int

    def paces(self, round: int, steps: int) -> NDArray[np.float32]:
        """Return the pace of each of a client's `steps` steps of a round: [steps].

        Rounds are counted from 1; what is tried before the first is as in the first.

        Raises:
            ConfigError: the schedule does not return a number that a step size can be multiplied by.
        """
        return _paces(self.schedule, self.rounds, min(max(round, 1), self.rounds), steps)

    def at_full_pace(self) -> Pacing:
        """Return paces of 1, with which what has no schedule shares the steps of what has one."""
        return Pacing(Constant(), self.rounds)


def changes_within_a_round(schedule: Function) -> bool:
    """Return whether a schedule, or the one that follows it, changes with every step."""
    then = getattr(schedule, "then", None)
    return getattr(schedule, "per", "round") == "step" or (then is not None and changes_within_a_round(then))


@functools.lru_cache(maxsize=1024)  # clients with as many steps share them
def _paces(schedule: Function, rounds: int, round: int, steps: int) -> NDArray[np.float32]:
    if not changes_within_a_round(schedule):
        return np.full(steps, _value(schedule, round - 1, rounds), np.float32)
    return np.array([_value(schedule, round - 1 + k / steps, rounds) for k in range(steps)], np.float32)


def _value(schedule: Any, t: float, rounds: int) -> float:
    try:
        value = schedule(t, rounds)
        found = float(value)
    except Exception as error:
        why = f"{type(error).__name__}: {error}{in_user_code(error)}"
        raise ConfigError([f"schedule: it cannot be asked at t = {t:g} of {rounds} rounds: {why}"]) from error
    if not (math.isfinite(found) and found >= 0):
        raise ConfigError(
            [f"schedule: at t = {t:g} of {rounds} rounds it returns {value!r}: return a number of 0 or more"]
        )
    return found
