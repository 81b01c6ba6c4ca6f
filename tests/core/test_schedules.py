import dataclasses
import math

import numpy as np
import pytest
import torch

from coterie.core.errors import ConfigError
from coterie.core.schedules import Constant, Cosine, Pacing, Schedule, Step, Warmup, changes_within_a_round

ROUNDS = 12


def theirs(make) -> list[float]:
    """The learning rates of a scheduler of torch's, one for each round."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler, found = make(optimizer), []
    for _ in range(ROUNDS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def ours(schedule, steps=1) -> np.ndarray:
    pacing = Pacing(schedule, ROUNDS)
    return np.concatenate([pacing.paces(round, steps) for round in range(1, ROUNDS + 1)])


LR = torch.optim.lr_scheduler
WARM = lambda optimizer: LR.LinearLR(optimizer, start_factor=0.1, total_iters=4)  # noqa: E731


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (Constant(), lambda optimizer: LR.ConstantLR(optimizer, factor=1.0)),
        (Step(5, 0.3), lambda optimizer: LR.StepLR(optimizer, step_size=5, gamma=0.3)),
        (Cosine(), lambda optimizer: LR.CosineAnnealingLR(optimizer, T_max=ROUNDS)),
        (Cosine(0.2), lambda optimizer: LR.CosineAnnealingLR(optimizer, T_max=ROUNDS, eta_min=0.2)),
        (Warmup(4), WARM),
        (
            Warmup(4, then=Cosine(0.1)),
            lambda optimizer: LR.SequentialLR(
                optimizer,
                [WARM(optimizer), LR.CosineAnnealingLR(optimizer, T_max=ROUNDS - 4, eta_min=0.1)],
                milestones=[4],
            ),
        ),
        (
            Warmup(4, then=Step(3, 0.5)),
            lambda optimizer: LR.SequentialLR(
                optimizer, [WARM(optimizer), LR.StepLR(optimizer, step_size=3, gamma=0.5)], milestones=[4]
            ),
        ),
    ],
    ids=["constant", "step", "cosine", "cosine to 0.2", "warm-up", "warm-up, cosine", "warm-up, step"],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
def test_schedules_are_torchs(schedule, make):
    np.testing.assert_allclose(ours(schedule), theirs(make), rtol=1e-5, atol=1e-7)


def test_step_by_step_it_is_the_same_curve_at_more_places():
    """With K = 4 steps a round, step k of round r is at t = r - 1 + k / 4: a run of 4 R rounds has the same values."""
    for schedule, slower in ((Cosine(0.1, "step"), Cosine(0.1)), (Warmup(2, 0.1, "step"), Warmup(8, 0.1))):
        expected = np.array([slower(t, 4 * ROUNDS) for t in range(4 * ROUNDS)])
        np.testing.assert_allclose(ours(schedule, 4), expected, rtol=1e-6)
    assert changes_within_a_round(Warmup(2, then=Cosine(per="step")))
    assert not changes_within_a_round(Warmup(2))
    assert len(set(Pacing(Cosine(), ROUNDS).paces(3, 4).tolist())) == 1  # by the round, all steps of a round are alike


def test_a_function_and_a_class_of_ones_own():
    np.testing.assert_allclose(ours(lambda t, rounds: 0.9**t), 0.9 ** np.arange(ROUNDS), rtol=1e-6)

    @dataclasses.dataclass(frozen=True)
    class Root(Schedule):
        power: float = 0.5

        def __call__(self, t, rounds):
            return (1 - t / rounds) ** self.power

    assert ours(Root(2.0))[3] == pytest.approx((1 - 3 / ROUNDS) ** 2)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (lambda t, rounds: -1.0, "returns -1.0: return a number of 0 or more"),
        (lambda t, rounds: math.nan, "returns nan"),
        (lambda t, rounds: None, r"cannot be asked at t = 0 of 12 rounds: TypeError"),
        (lambda t: 1.0, r"cannot be asked at t = 0 of 12 rounds: TypeError"),
    ],
)
def test_what_is_no_pace_is_said_in_words(schedule, words):
    with pytest.raises(ConfigError, match=words):
        Pacing(schedule, ROUNDS).paces(1, 3)
