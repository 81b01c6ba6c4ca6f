"""Say before a run what it will do, and what in it can do nothing.

Much of it is measured: a few clients work through two real rounds, uncompiled and with a limited number of steps
(`probe.py`). From that follow the costs of the run (`plan_costs.py`) and the warnings (`plan_warnings.py`). A first
look (`first_look`), for the first lines of a run, takes four steps instead.
"""

from __future__ import annotations

import dataclasses
import time
import warnings as python_warnings
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import CoterieError, CoterieWarning
from coterie.engine import Engine
from coterie.engine.peers import Peers
from coterie.experiment.building import Model
from coterie.experiment.federations import Data
from coterie.experiment.plan_costs import Memory, Traffic, memory_of, seconds_of, traffic_by_probe, traffic_of
from coterie.experiment.plan_warnings import certain, diverged, held, inert, one_sided
from coterie.experiment.probe import (
    KEPT_BYTES,
    MAX_CLIENTS,
    Probe,
    Pull,
    engine_of,
    make_probe,
    progress_of,
    pull_of,
    slow,
    spread,
)
from coterie.experiment.setup import Setup, prepare
from coterie.methods.fields import AnyMethod
from coterie.storage.state import State

MAX_SAMPLED = 200_000  # clients times rounds for which participation is worked out


class Size(NamedTuple):
    """Limits of a probe."""

    clients: int
    steps: int  # of a client and round
    watched: int  # clients, one at a time


@dataclasses.dataclass(frozen=True)
class Weights:
    """How much clients weigh for each other after the second round; medians over clients."""

    own: float  # of a client's own model
    strongest: float  # of the other client that weighs most
    others: float  # how many others count: exp of the entropy of their weights


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """What a run will do. `warnings` says, in sentences, what in it can do nothing, and what to do about it."""

    method: str
    data: str
    model: str
    rounds: int
    clients: dict[str, dict[str, int]]  # training, validation and test examples by client
    steps: dict[str, int]  # of a client and round: least, median, most; and all of the run
    participants: int  # in a round
    hearing: str  # who hears whom, in a sentence
    traffic: Traffic | None
    memory: Memory
    warnings: list[str]
    pull_option: str = ""
    pull: Pull | None = None
    progress: float | None = None
    weights: Weights | None = None
    seconds: tuple[float, float] | None = None  # of the whole run, from and to
    privacy: dict[str, Any] | None = None  # epsilon of every client, and what is released
    probe: dict[str, Any] | None = None  # what was tried: clients, steps of each, rounds, seconds

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        pull = None if self.pull is None else self.pull._asdict()
        return dataclasses.asdict(self) | {"pull": pull}


def plan(
    method: str | AnyMethod | None = None, data: Data | None = None, *, model: Model | None = None, **settings: Any
) -> RunPlan:
    """Say what `coterie.run` with the same arguments would do, without doing it.

    Args:
        method: as in `coterie.run`.
        data: as in `coterie.run`.
        model: as in `coterie.run`.
        **settings: as in `coterie.run`.

    Returns:
        What the run will do, and `warnings` about what in it can do nothing.

    Raises:
        ConfigError: settings are wrong; it lists every problem.
        DataError: the data are missing or malformed.

    Examples:
        >>> import coterie
        >>> planned = coterie.plan("fedprox", "hospitals", model="linear", rounds=5, mu=0.1)
        >>> planned.participants, planned.traffic.total  # clients of a round; bytes of all rounds
        (8, 13600)
    """
    return plan_setup(prepare(method, data, model=model, **settings))


def plan_setup(setup: Setup) -> RunPlan:
    """Plan a run that is prepared. The probe takes some seconds."""
    setup.one_task()  # all that follows is about one model
    begin = time.perf_counter()
    first, size = _without_probe(setup), _size(setup)
    sim = make_probe(setup, size.clients, size.steps)
    found: dict[str, Any] = {"warnings": list(first.warnings), "traffic": first.traffic}
    with python_warnings.catch_warnings(record=True) as caught:
        python_warnings.simplefilter("always", CoterieWarning)
        try:
            found |= _measured(setup, sim, size, first)
        except CoterieError as error:  # it diverged
            found["warnings"].append(diverged(setup, error))
    said = [str(each.message) for each in caught if issubclass(each.category, CoterieWarning)]
    found["warnings"] = list(dict.fromkeys([*found["warnings"], *said]))
    found["probe"] = {
        "clients": len(sim.federation.names),
        "steps": max(sim.steps(i) for i in range(len(sim.federation.names))),
        "rounds": 2,
        "seconds": time.perf_counter() - begin,
    }
    return dataclasses.replace(first, **found)


def first_look(setup: Setup) -> RunPlan:
    """Plan a run that is about to begin, in a fraction of a second: bytes, and what certainly does nothing."""
    first = _without_probe(setup)
    if not setup.method.pull_option or slow(setup) or setup.config.method == "local":
        return first
    sim = make_probe(setup, 2, 4)
    with python_warnings.catch_warnings():
        python_warnings.simplefilter("ignore", CoterieWarning)  # the run will say it
        try:
            sim.train(1, Engine("loop"))
            pull = pull_of(sim, 2, [0])
        except CoterieError:
            return first
    return dataclasses.replace(first, pull=pull, warnings=[*first.warnings, *inert(setup, pull, first.steps)])


def _without_probe(setup: Setup) -> RunPlan:
    """Plan what needs no training: everything but the pull, the weights and the minutes."""
    config, federation = setup.config, setup.federation
    size = len(federation.names)
    plan = dataclasses.replace(config.plan(), withheld=setup.method.withheld_share)
    each = [plan.num_steps(number) for number in federation.sizes]
    participants = config.participants(size)
    steps = {
        "least": min(each),
        "median": int(median(each)),
        "most": max(each),
        "all": round(config.rounds * participants * sum(each) / size),
    }
    counts = {
        name: {part: len(split[part]) for part in ("train", "validation", "test")}
        for name, split in federation.clients.items()
    }
    taking_part = _rounds_of_each(setup)
    return RunPlan(
        method=config.method,
        data=config.data,
        model=config.model,
        rounds=config.rounds,
        clients=counts,
        steps=steps,
        participants=participants,
        hearing=_hearing(setup, taking_part),
        traffic=traffic_of(setup),
        memory=memory_of(setup),
        warnings=certain(setup, taking_part),
        pull_option=setup.method.pull_option,
        privacy=None if setup.budget is None else setup.budget.to_json() | {"words": setup.budget.sentence()},
    )


def _measured(setup: Setup, sim: Probe, size: Size, first: RunPlan) -> dict[str, Any]:
    """Run the probe; return what it shows, as fields of `RunPlan`."""
    engine = engine_of(setup, sim)
    one = sim.train(1, engine)
    watched = spread(sim.federation, size.watched)
    pull = pull_of(sim, 2, watched) if setup.method.pull_option else None
    before = sim.views(1, engine)
    begin = time.perf_counter()
    two = sim.train(2, engine)
    seconds = time.perf_counter() - begin
    progress = progress_of(sim, before, sim.views(2, engine), 2, watched)
    begin = time.perf_counter()
    sim.evaluate(2, engine)
    evaluating = time.perf_counter() - begin
    collaboration = two.server_info.get("collaboration")
    weights = _weights(collaboration) if collaboration is not None and len(collaboration) > 2 else None
    warnings = [
        *first.warnings,
        *inert(setup, pull, first.steps),
        *held(setup, pull, progress),
        *one_sided(setup, collaboration, two.server_info.get("weight"), sim.federation.names),
    ]
    clients = len(sim.federation.names)
    of_run = seconds * first.steps["all"] / sum(map(sim.steps, range(clients)))
    evaluations = -(-setup.config.rounds // setup.config.evaluate_every) * len(first.clients) / clients
    return {
        "pull": pull,
        "progress": progress,
        "weights": weights,
        "warnings": warnings,
        "traffic": first.traffic
        or traffic_by_probe(setup, (one.bytes_up, one.bytes_down), (two.bytes_up, two.bytes_down), sim),
        "seconds": seconds_of(setup, of_run, evaluating * evaluations),
    }


def _size(setup: Setup) -> Size:
    """Return how much a probe tries: less, the longer a step takes. It does not depend on the machine."""
    model = tree.nbytes(setup.task.init())
    if not slow(setup):
        clients, steps, watched = MAX_CLIENTS, 200, 3
    elif model <= 2**22:
        clients, steps, watched = 8, 20, 2
    else:
        clients, steps, watched = 2, 4, 1
    wanted = max(setup.config.participants(len(setup.federation.names)), 8)
    return Size(max(2, min(clients, wanted, KEPT_BYTES // (4 * model))), steps, watched)


def _rounds_of_each(setup: Setup) -> list[int] | None:
    """Return in how many rounds each client takes part; None if that is long to find out."""
    config, size = setup.config, len(setup.federation.names)
    participants = config.participants(size)
    if participants >= size and config.sampler is None:
        return [config.rounds] * size
    if config.rounds * size > MAX_SAMPLED:
        return None
    empty = State((), ())
    sim = Probe(setup.method, setup.task, setup.federation, config.plan(), participants, config.seed, empty)
    sim.sampler = config.sampler
    times = [0] * size
    for number in range(1, config.rounds + 1):
        for client in sim.sample(number):
            times[client] += 1
    return times


def _hearing(setup: Setup, times: list[int] | None) -> str:
    config, size = setup.config, len(setup.federation.names)
    participants = config.participants(size)
    if config.method == "local":
        return "nobody hears anybody"
    who = f"all {size} clients take part in every round"
    if participants < size:
        often = "" if times is None else f": each in {_range(min(times), max(times))} of {config.rounds} rounds"
        who = f"{participants} of {size} clients take part in a round{often}"
    if config.clients_heard is not None and config.clients_heard < participants:
        who += f", of whom {config.clients_heard} are heard"
    if isinstance(setup.peers, Peers):
        near = [len(each) - 1 for each in setup.peers.near]
        return f"{who}; a client hears {_range(min(near), max(near))} neighbours"
    return f"{who}, through one server"


def _weights(collaboration: Tensor) -> Weights:
    own = collaboration.diagonal()
    others = collaboration - torch.diag(own)
    share = others / others.sum(1, keepdim=True).clamp_min(1e-12)
    number = torch.special.entr(share).sum(1).exp() * (others.sum(1) > 0)
    return Weights(*(float(each.median()) for each in (own, others.amax(1), number)))


def _range(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"
