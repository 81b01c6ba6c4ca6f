"""The second half of law 4 finds options that make a method useless, and only these."""

import dataclasses
import math
from typing import Annotated, ClassVar

import pytest
import torch
from pydantic import Field

from coterie import SGD, ConfigError, testing
from coterie.methods import FedAvg, FedMAP, Local, PFedMe
from coterie.testing.learning import CHANCE, ENOUGH, LEFT
from tests.testing.test_defects import Anchored


class Slow(Anchored):
    not_meant_to_learn: ClassVar = {"prior = strict": "it is for the faint-hearted"}


def test_the_easy_federation_is_easy_but_takes_more_than_one_round():
    alone = testing.learn(Local())
    assert alone.last_accuracy > 0.9
    assert alone.first_accuracy < ENOUGH + 0.1
    assert alone.last_loss < 0.4 * alone.first_loss
    assert alone.complaint is None
    assert testing.learn(FedAvg(SGD(1e-9))) == testing.learn(FedAvg(SGD(1.0))), "the law has its own optimiser"


def test_a_model_that_was_not_trained_is_at_chance():
    class Idle(Local):
        def local_update(self, task, client, down, batches):
            return client, (), {"loss": torch.zeros(())}

    idle = testing.learn(Idle())
    assert idle.first_accuracy == idle.last_accuracy < CHANCE + 0.15
    assert "right after 10 rounds, not 70% (chance 25%)" in idle.complaint


@pytest.mark.parametrize(
    ("numbers", "complaint"),
    [
        ((0.3, 1.2, ENOUGH + 0.01, LEFT * 1.2), None),
        ((0.3, 1.2, ENOUGH - 0.01, 0.1), "69% right after"),
        ((0.3, 1.2, 0.9, LEFT * 1.2 + 0.01), "a loss of 0.91 after 10 rounds, not 75% of the 1.2 after the first"),
        ((0.99, 0.1, 0.99, 0.1), None),  # there was nothing left to learn
        ((0.3, 1.2, 0.9, math.nan), "a loss of nan"),
        ((0.3, 1.2, math.nan, 0.1), "nan% right"),
    ],
)
def test_what_is_enough(numbers, complaint):
    found = testing.Learned(*numbers).complaint
    assert found is None if complaint is None else complaint in found


@pytest.mark.parametrize(
    ("broken", "sound"),
    [
        # sigma2 = 15 makes a pull of 0.37 on each weight, whatever the loss says.
        (FedMAP(prior="laplace", sigma2=15.0, tau=0.01), FedMAP(prior="laplace")),
        # With a step size of its own, the shared model hardly moves, however large the steps of the clients are.
        (PFedMe(outer_lr=0.01), PFedMe()),
    ],
    ids=["fedmap", "pfedme"],
)
def test_defaults_that_once_made_a_method_useless_are_found(broken, sound):
    assert testing.learn(broken).complaint is not None
    assert testing.learn(sound).complaint is None


def test_training_that_diverges_is_found():
    @dataclasses.dataclass(frozen=True)
    class Explodes(Local):
        factor: Annotated[float, Field(ge=1, description="of the model after a round")] = 1e30

        def local_update(self, task, client, down, batches):
            theta, up, info = super().local_update(task, client, down, batches)
            return {name: self.factor * value for name, value in theta.items()}, up, info

    with pytest.raises(testing.LawBroken, match="with defaults, the method does not learn: training diverged"):
        testing.every_setting_learns(Explodes())


def test_a_setting_that_is_not_meant_to_learn_says_why():
    (row,) = testing.check(Slow(), only=(4,))
    assert row.outcome == "held"
    assert row.words.startswith("prior = strict is not meant to learn: it is for the faint-hearted")


def test_the_reason_needs_an_option_and_words():
    class Careless(Anchored):
        not_meant_to_learn: ClassVar = {"pryor = strict": "a slip", "prior": " "}

    with pytest.raises(ConfigError) as found:
        testing.every_setting_learns(Careless())
    assert found.value.problems == [
        "Careless.not_meant_to_learn names 'pryor = strict', which is no option of it",
        "Careless.not_meant_to_learn does not say why 'prior' is not",
    ]


def test_settings_go_to_no_extremes():
    names = [name for name, _ in testing.settings(FedMAP(), numbers=True)]
    assert {"prior = laplace", "weighting = omega", "pull = 0.05", "prior_steps = 2"} <= set(names)
    assert "prior = laplace, pull = 0.05" in names
    assert len(names) == len(set(names))
    words = [name for name, _ in testing.settings(FedMAP(), numbers=False)]
    assert "pull = 0.05" not in words
    assert "likelihood = sum" in words
