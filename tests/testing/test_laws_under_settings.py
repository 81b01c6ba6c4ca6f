"""Laws 2, 10, 11 and 12 under what may be wrapped around a method: a schedule, clipping, the server's optimiser."""

import pytest

from coterie import METHODS, testing
from coterie.compute.compiled import observing, slowest
from coterie.core import tree
from coterie.engine import Engine, make_peers
from coterie.engine.process_pool import can_fork
from coterie.experiment.setup import prepare
from coterie.experiment.simulation import Simulation
from coterie.testing import engine_laws, kit
from tests.marks import compiles

SCHEDULE = {"schedule": "warmup:rounds=1:then=cosine:per=step"}
CLIPPING = {"clip_gradient": 0.5, "clip_gradient_value": 0.2}
EVERYTHING = {**SCHEDULE, **CLIPPING, "server_optimizer": "fedadam:lr=0.05"}
CASES = [
    ("fedavg", SCHEDULE),
    ("fedavg", CLIPPING),
    *[
        ("fedavg", {"server_optimizer": name})
        for name in ("fedavgm", "fedadam:lr=0.05", "fedyogi:lr=0.05", "fedadagrad")
    ],
    *[(name, EVERYTHING) for name in ("fedprox", "fedmap", "scaffold", "ditto")],
    ("fedamp", {**SCHEDULE, **CLIPPING}),
]
NAMES = [f"{name}-{'+'.join(each.partition(':')[0] for each in map(str, given))}" for name, given in CASES]
pytestmark = pytest.mark.slow


def setup_of(name, given):
    method = testing.plain(METHODS[name]())
    how = {"model": kit.module(norm=False), "rounds": 3, "batch_size": 4, "clients_per_round": 3, "reference": False}
    return prepare(method, kit.federation(), **how, **engine_laws.UNCOMPILED, **given)


def outcome(setup, engine=kit.LOOP, place=None):
    """States, what clients deploy, and what that predicts, after three rounds."""
    plan = setup.config.plan()
    sim = Simulation.start(setup.method, setup.task, setup.federation, plan, 3, seed=0, place=place)
    for number in (1, 2, 3):
        sim.train(number, engine)
    return sim.state, sim.views(3, engine), sim.predictions(3, engine).outputs


@compiles
@pytest.mark.parametrize(("name", "given"), CASES, ids=NAMES)
def test_every_engine_agrees(name, given):
    setup = setup_of(name, given)
    base = outcome(setup)
    unchanged = outcome(setup_of(name, {}))
    assert any(not a.equal(b) for a, b in zip(tree.leaves(base[1]), tree.leaves(unchanged[1]), strict=True))
    with observing() as seen:
        for words, engine in engine_laws.engines():
            kit.same(base, outcome(setup, engine), f"{words} and one client at a time differ", engine_laws.ROUNDING)
    assert slowest(seen).path == "replayed"


@compiles
@pytest.mark.parametrize(("name", "given"), CASES, ids=NAMES)
def test_workers_change_nothing(name, given):
    setup = setup_of(name, given)
    kinds = [{"compiled": True, "chunk": 3, "lanes": 2, "threads": True}, *([{"chunk": 1}] if can_fork() else [])]
    for kind in kinds:
        one, other = (outcome(setup, Engine("stacked", workers=number, **kind)) for number in (1, 2))
        kit.same(one, other, "two workers give other results than one", tolerance=0)


@compiles
@pytest.mark.parametrize(("name", "given"), CASES, ids=NAMES)
def test_resuming_changes_nothing(name, given):
    for how in (engine_laws.UNCOMPILED, engine_laws.COMPILED):
        engine_laws._resumes(testing.plain(METHODS[name]()), False, {**how, **given}, "")


@pytest.mark.parametrize(("name", "given"), CASES, ids=NAMES)
def test_the_server_equals_peers(name, given):
    if not METHODS[name].peer_to_peer:
        pytest.skip("the method needs one server")
    setup = setup_of(name, given)
    one = outcome(setup)
    many = outcome(setup, place=make_peers("complete", setup.federation.names, seed=0))
    kit.same(one[1:], many[1:], "server and peers differ", engine_laws.ROUNDING)
