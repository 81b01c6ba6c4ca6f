"""Where training left the finite numbers is found by repeating the client's update, against closed forms."""

import math

import pytest
import torch
from torch import nn

from coterie import SGD, CoterieError
from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.scan import scan
from coterie.core.task import Task
from coterie.core.training import train
from coterie.data import from_clients
from coterie.data.minibatches import Plan
from coterie.engine import Engine
from coterie.experiment import simulation as simulations
from coterie.experiment.divergence import find_divergence
from coterie.experiment.simulation import Simulation
from coterie.methods import FedAvg
from tests.engine.small import simulation

STEEP = 5e9 + 0.5  # a step of SGD makes w <- w (1 - 2 STEEP) = -1e10 w, so losses are 1, 1e20, infinite


def parabola(method, clients=("calm", "steep"), x=1.0):
    """f(w) = (w x)^2 from w = 1; the client `calm` has x = 0, where nothing happens."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    data = {name: (torch.full((10, 1), 0.0 if name == "calm" else x), torch.zeros(10, 1)) for name in clients}
    federation = from_clients(data, num_classes=None, validation=2, test=2)
    return Simulation.start(method, Task(module, "regression"), federation, Plan(1, 1), len(clients), seed=0)


def rows(sim, client=0):
    return sim._work(1, sim.sample(1))[1]([client])


def found(update, sim=None):
    sim = sim or parabola(FedAvg())
    return find_divergence(update, sim.task, rows(sim, 1))


@pytest.mark.parametrize("kind", ["loop", "stacked"])
def test_a_parabola_diverges_in_the_step_that_the_closed_form_says(kind):
    with pytest.raises(CoterieError) as told:
        parabola(FedAvg(SGD(STEEP))).train(1, Engine(kind))
    assert str(told.value) == (
        "training diverged: client 'steep' has NaN or infinite values in round 1, from step 3 of 6 on; "
        "the last finite loss was 1e+20 (of the round's first step: 1). Try a smaller learning rate (--lr, now 5e+09); "
        "the checkpoints before this round are kept."
    )


def test_the_client_that_is_named_is_the_one_that_is_repeated():
    """With partial participation and in any order, the named client's own rows are taken."""
    with pytest.raises(CoterieError, match=r"client 'steep' .* from step 3 of 6 on"):
        parabola(FedAvg(SGD(STEEP)), ("steep", "calm")).train(1, Engine("stacked"))


def test_nothing_is_repeated_unless_training_diverged(monkeypatch):
    monkeypatch.setattr(simulations, "find_divergence", lambda *_: pytest.fail("repeated"))
    sim = simulation()
    for number in range(1, 4):
        sim.train(number, Engine("stacked"))


def test_a_second_pass_is_told_apart():
    def update(task, client, down, batches):
        w, _ = train(task, SGD(1e-3), down, batches)
        w, loss = train(task, SGD(STEEP), w, batches)
        return w, loss

    where = found(update)
    assert (where.step.number, where.step.scan, where.steps) == (3, 2, 6)
    assert "from step 3 of 6 of its training pass 2 on" in where.in_words()


def test_what_the_method_computes_beside_its_steps():
    def update(task, client, down, batches):
        w, loss = train(task, SGD(1e-3), down, batches)
        return tree.map(lambda leaf: leaf * math.inf, w), loss

    where = found(update)
    assert where.step is None
    assert where.again
    assert "every step stays finite" in where.in_words()
    assert "the last finite loss was 0.9" in where.in_words()
    assert "--debug" in where.advice()


def test_what_only_the_engine_made_infinite():
    where = found(lambda task, client, down, batches: train(task, SGD(1e-3), down, batches))
    assert where.step is None
    assert not where.again
    assert "not when its steps are repeated one by one in plain PyTorch" in where.in_words()


def test_inputs_that_are_not_finite():
    sim = parabola(FedAvg())
    parts, batches = rows(sim, 1)
    pool = batches.x.clone()
    pool[batches.index[0, 0, 1]] = math.nan  # of the second step
    where = find_divergence(
        lambda task, client, down, batches: train(task, SGD(1e-3), down, batches), sim.task,
        (parts, batches._replace(x=pool)),
    )  # fmt: skip
    assert (where.step.number, where.step.finite_inputs) == (2, False)
    assert "look at this client's data" in where.advice()


def test_a_model_that_was_too_far_off_before():
    def update(task, client, down, batches):
        return train(task, SGD(1e-3), tree.map(lambda leaf: leaf * 1e30, down), batches)

    where = found(update)
    assert (where.step.number, where.last) == (1, None)
    assert "too far off when the round began" in where.advice()
    assert "loss" not in where.in_words()


def test_an_infinity_that_is_carried_from_the_start_is_not_blamed():
    def update(task, client, down, batches):
        def step(carry, aux, batch):
            w, least = carry
            loss, _ = task.loss(w, batch)
            return tree.map(lambda leaf: leaf * 1e15, w), torch.minimum(loss, least)

        return scan(step, (down, torch.full((), math.inf)), (), batches)

    where = found(update)
    assert where.step.number == 3  # the losses are 1, 1e30 and infinite


def test_a_loss_that_is_only_measured_does_not_hide_the_step_that_trains():
    def update(task, client, down, batches):
        def measure(carry, aux, batch):
            return carry + task.losses(tree.map(lambda leaf: leaf * 1e30, aux), batch.x, batch.y).sum()

        scan(measure, torch.zeros(()), down, batches)
        return train(task, SGD(STEEP), down, batches)

    assert found(update).step.number == 3


def test_losses_inside_a_vmap_of_the_methods_own():
    def update(task, client, down, batches):
        two = tree.map(lambda leaf: torch.stack([leaf, leaf]), down)
        return torch.func.vmap(lambda w: train(task, SGD(STEEP), w, batches))(two)

    where = found(update)
    assert where.step.number == 3  # by its parameters, or by the loss that it carries
    assert where.last is None


def test_an_update_that_cannot_be_repeated():
    def update(task: Task, client: object, down: object, batches: Batches) -> object:
        raise ValueError("this routine takes no NaN")

    assert found(update) is None
