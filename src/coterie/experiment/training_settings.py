"""Settings of how a federation trains that stand for things of the user's own: who takes part, step sizes, the server.

The configuration holds the things themselves; a file holds their text (`coterie.methods.named`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from coterie.core.errors import ConfigError
from coterie.core.optimizers import Optimizer
from coterie.core.schedules import SCHEDULES, Pacing, Schedule
from coterie.core.wrapped import Clipped, Wrapped, wrapped
from coterie.engine.samplers import SAMPLERS, Sampler
from coterie.methods.fields import AnyMethod, with_optimizer
from coterie.methods.named import OWN, Kind
from coterie.parts import robust
from coterie.parts.server_optimizers import SERVER_OPTIMIZERS, server_optimized

SCHEDULE = Kind("schedule", SCHEDULES, Schedule, "f(t, rounds)")
SAMPLER = Kind("sampler", SAMPLERS, Sampler, "f(clients, number, round, seed)")
SERVER_OPTIMIZER = Kind("server optimizer", SERVER_OPTIMIZERS, Optimizer)
GIVEN = "_given"  # an attribute of a method that has things wrapped around it: the method without them
CLIPPING = ("clip_gradient", "clip_gradient_value")


def _setting(kind: Kind) -> Any:
    """Return the type of a setting for pydantic: read when a configuration is made, written when it is saved."""

    def read(value: Any) -> Any:
        try:
            return None if value is None else kind.read(value)
        except ConfigError as error:
            raise ValueError("; ".join(error.problems)) from error

    def write(thing: Any) -> str | None:
        return None if thing is None else kind.write(thing)

    return Annotated[Any, BeforeValidator(read), PlainSerializer(write)]


if TYPE_CHECKING:
    ScheduleSetting = Any
    SamplerSetting = Any
    ServerOptimizerSetting = Any
else:
    ScheduleSetting = _setting(SCHEDULE)
    SamplerSetting = _setting(SAMPLER)
    ServerOptimizerSetting = _setting(SERVER_OPTIMIZER)


def from_python(values: Mapping[str, Any]) -> set[str]:
    """Return which of the settings in a file stand for things that came from Python, and have no name there."""
    named = {**values, "optimizer": values.get("optimizer", {}).get("name")}
    keys = ("optimizer", "schedule", "sampler", "server_optimizer")
    return {key for key in keys if str(named.get(key)).startswith(OWN)}


def problems_of(config: Any) -> list[str]:
    """Say what is wrong with these settings that can be known before there are data."""
    found = []
    if (pacing := pacing_of(config)) is not None:
        try:
            for round in range(1, config.rounds + 1):
                pacing.paces(round, 1)
        except ConfigError as error:
            found += error.problems
    clips = [key for key in CLIPPING if getattr(config, key) is not None]
    if clips and config.privacy == "record":
        found.append(
            f"{', '.join(clips)}: with privacy = 'record' the gradient of each example is clipped already, by clip: "
            "leave this out"
        )
    return found


def in_words(config: Any) -> list[str]:
    """Return what a line about the run says of these settings; nothing of those that are not set."""
    found = []
    if config.schedule is not None:
        found.append(f"schedule {_name(SCHEDULE, config.schedule)}")
    if clips := [f"{getattr(config, key):g}" for key in CLIPPING if getattr(config, key) is not None]:
        found.append(f"gradients clipped to {' and '.join(clips)}")
    if config.sampler is not None:
        found.append(f"sampler {_name(SAMPLER, config.sampler)}")
    if config.server_optimizer is not None:
        found.append(f"server optimizer {_name(SERVER_OPTIMIZER, config.server_optimizer)}")
    return found


def to_json(config: Any) -> dict[str, Any]:
    """Return those of these settings that are set, as a file has them."""
    keys = ("schedule", *CLIPPING, "sampler", "server_optimizer")
    return {key: value for key, value in config.model_dump(include=set(keys)).items() if value is not None}


def _name(kind: Kind, thing: Any) -> str:
    return kind.write(thing).partition(":")[0] if type(thing) in kind.known.values() else kind.write(thing)


def clipping_of(method: AnyMethod) -> dict[str, float | None]:
    """Return the settings of the clipping that is wrapped around the optimiser of an instance, if any is."""
    optimizer = getattr(method, "optimizer", None)
    while isinstance(optimizer, Wrapped) and not isinstance(optimizer, Clipped):
        optimizer = optimizer.inner
    return dict(zip(CLIPPING, (optimizer.norm, optimizer.value), strict=True)) if isinstance(optimizer, Clipped) else {}


def pacing_of(config: Any) -> Pacing | None:
    """Return the run's schedule of the learning rate, if there is one."""
    return None if config.schedule is None else Pacing(config.schedule, config.rounds)


def as_trained(config: Any, method: AnyMethod) -> AnyMethod:
    """Return a method as a run calls it: robust, with the server's optimiser, and with its own one wrapped.

    Messages are made robust first; the server's optimiser steps towards their mean. A method that a run calls already
    is taken as it was before.

    Raises:
        ConfigError: it cannot be robust, or its server cannot have an optimiser.
    """
    given = method = getattr(method, GIVEN, method)
    if config.method != "local":
        if config.robust is not None:
            method = robust.robust(method, config.robust)
        if config.server_optimizer is not None:
            method = server_optimized(method, config.server_optimizer)
    optimizer = getattr(method, "optimizer", None)
    if isinstance(optimizer, Optimizer):
        norm, value, paced = config.clip_gradient, config.clip_gradient_value, config.schedule is not None
        method = with_optimizer(method, wrapped(optimizer, norm=norm, value=value, paced=paced))
    if method is not given:
        object.__setattr__(method, GIVEN, given)
    return method
