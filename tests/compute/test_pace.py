"""A learning rate with a schedule is a value of a compiled step: one step for all rounds, in every engine."""

import dataclasses

import pytest

from coterie.compute.compiled import compilations, observing
from coterie.core.optimizers import SGD
from coterie.core.schedules import Constant, Cosine, Pacing, Warmup
from coterie.core.wrapped import Clipped, Paced
from coterie.engine import Engine
from coterie.experiment.simulation import Simulation
from coterie.methods import FedAvg, PFedMe
from coterie.testing import kit
from tests.marks import compiles

pytestmark = [compiles, pytest.mark.xdist_group("paces"), pytest.mark.usefixtures("compiled_once")]
ROUNDS = 3


def trained(method, engine, schedule):
    plan = dataclasses.replace(kit.PLAN, pacing=Pacing(schedule, ROUNDS))
    sim = Simulation.start(method, kit.task(norm=False), kit.federation(), plan, len(kit.SIZES), seed=0)
    for number in range(1, ROUNDS + 1):
        sim.train(number, engine)
    return sim.state


@pytest.mark.parametrize("method", [FedAvg(Paced(Clipped(SGD(0.1, momentum=0.9), 1.0))), PFedMe(Paced(SGD(0.05)))])
def test_all_rounds_schedules_and_step_sizes_share_a_compiled_step(method):
    """C++ repeats it, with a pace of its own for every step; the loop engine in ordinary PyTorch agrees."""
    before = compilations()
    schedule = Warmup(1.0, then=Cosine(per="step"))
    with observing() as seen:
        found = trained(method, Engine("stacked", compiled=True, threads=True, workers=2), schedule)
    assert {outcome.path for outcome in seen} == {"replayed"}
    assert compilations() - before == 1
    kit.same(found, trained(method, kit.LOOP, schedule), "compiled", 1e-4)
    trained(method, Engine("stacked", compiled=True, threads=True), Constant(0.5))
    if isinstance(method, FedAvg):  # whose step has no step size of its own
        trained(
            FedAvg(Paced(Clipped(SGD(0.3, momentum=0.9), 1.0))),
            Engine("stacked", compiled=True, threads=True),
            schedule,
        )
    assert compilations() - before == 1
