import math

import pytest
import torch

from coterie.core.batches import Batches
from coterie.core.errors import CoterieError
from coterie.core.optimizers import SGD, Adam
from coterie.parts.pulls import HELD_BACK, pull_of_a_round, strength_of

TRAINED = {"weight": torch.zeros(4, 5), "bias": torch.zeros(5)}  # 25 parameters


def batches_of(steps: int, masked: int = 0) -> Batches:
    """Two epochs of so many minibatches; steps without examples are no steps."""
    mask = torch.ones(2, steps + masked, 3)
    mask[:, steps:] = 0
    index = torch.zeros(mask.shape, dtype=torch.int64)
    return Batches(torch.zeros(1, 1), torch.zeros(1), index, mask, index[..., 0], torch.tensor(3.0))


def test_a_pull_takes_back_its_share_of_the_way_in_a_round():
    """theta - w shrinks by (1 - eta p)^K on the pull alone, which is exp(-share) for many steps."""
    for optimizer, eta in ((SGD(0.1), 0.1), (SGD(0.1, momentum=0.5), 0.2), (Adam(0.1), 0.1 * 25**0.5)):
        for steps, masked in ((40, 0), (40, 7), (80, 3)):
            pull = pull_of_a_round(optimizer, 0.3, TRAINED, batches_of(steps, masked))
            assert (1 - eta * float(pull)) ** (2 * steps) == pytest.approx(math.exp(-0.3), rel=2e-3)


def test_a_client_without_steps_has_a_pull_too():
    assert float(pull_of_a_round(SGD(0.1), 0.3, TRAINED, batches_of(0, 2))) == pytest.approx(3.0)


def test_auto_holds_back_a_tenth_and_a_number_is_itself():
    batches = batches_of(40)
    assert float(strength_of(2, SGD(0.1), TRAINED, batches)) == 2.0
    found = float(strength_of("auto", SGD(0.1), TRAINED, batches))
    assert found == pytest.approx(float(pull_of_a_round(SGD(0.1), HELD_BACK, TRAINED, batches)))
    assert found == pytest.approx(0.1 / (0.1 * 80))


def test_an_optimiser_without_a_step_size_is_refused():
    with pytest.raises(CoterieError, match="needs an optimiser with a step size"):
        pull_of_a_round(object(), 0.3, TRAINED, batches_of(1))
