"""The private gradient: what one example can do to it, the noise, and what it leaves as it was."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from coterie.core import privacy, tree
from coterie.core.batches import NOBODY_DRAWN, Batch, Batches
from coterie.core.errors import ConfigError
from coterie.core.optimizers import SGD, Adam, AdamW
from coterie.core.privacy import Guard, Private, clipped_sum, gradient
from coterie.core.task import Task
from coterie.core.training import mean_loss, quadratic_penalty, train

numbers = st.floats(width=32, allow_nan=True, allow_infinity=True)
FREE = Guard(batch_size=100, clip=math.inf, noise=0.0, sum_noise=0.0)


def length(values):
    return math.sqrt(sum(float(leaf.double().square().sum()) for leaf in values.values()))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=6), st.floats(1e-3, 1e3), st.data())
def test_removing_an_example_changes_the_clipped_sum_by_at_most_the_clip(rows, clip, data):
    each = {"a": torch.tensor(rows)[:, :2], "b": torch.tensor(rows)[:, 2]}
    there = torch.ones(len(rows))
    gone = there.clone()
    gone[data.draw(st.integers(0, len(rows) - 1))] = 0
    one, other = clipped_sum(each, clip, there), clipped_sum(each, clip, gone)
    assert all(torch.isfinite(leaf).all() for leaf in one.values())
    rounding = 4e-7 * len(rows) * clip
    assert length({name: one[name].double() - other[name].double() for name in one}) <= clip + rounding


def test_clipped_vectors_keep_their_direction_and_short_ones_their_length():
    each = {"w": torch.tensor([[3e30, 4e30], [3e-3, 4e-3], [math.nan, 1.0], [math.inf, 1.0], [0.0, 0.0]])}
    alone = [clipped_sum(each, 1.0, torch.eye(5)[i])["w"] for i in range(5)]
    assert alone[0].tolist() == pytest.approx([0.6, 0.8], rel=2e-5)  # longer than float32 can square
    assert alone[1].tolist() == pytest.approx([3e-3, 4e-3], rel=1e-6)
    assert [leaf.tolist() for leaf in alone[2:]] == [[0.0, 0.0]] * 3


def quadratic(params, batch):
    """The mean of (1/2) ||w - x_i||^2, and a pull to 0 that no example enters into."""
    loss = (0.5 * ((params["w"] - batch.x) ** 2).sum(1) * batch.mask).sum() / batch.mask.sum().clamp_min(1e-6)
    return loss + 2 * (params["w"] ** 2).sum(), loss


def batch_of(x, mask=None):
    mask = torch.ones(len(x)) if mask is None else torch.tensor(mask)
    return Batch(x, torch.zeros(len(x), dtype=torch.int64), mask, torch.tensor(7))


def test_the_gradient_is_the_clipped_one_over_the_lot_with_the_penalty_unclipped():
    w, x = {"w": torch.tensor([1.0, 0.0])}, torch.tensor([[1.0, 10.0], [1.0, 0.5]])
    found, told = gradient(Guard(8, clip=1.0, noise=0.0), quadratic, w, batch_of(x), torch.tensor(4.0))
    # w - x = (0, -10), clipped to (0, -1), and (0, -1/2); the pull's gradient is 4 w.
    assert found["w"].tolist() == pytest.approx([4.0, -1.5 / 4], rel=1e-4)
    assert float(told) == pytest.approx((50 + 0.125) / 2)


def test_padding_and_whoever_was_not_drawn_change_nothing():
    w, x = {"w": torch.tensor([1.0, 0.0])}, torch.tensor([[1.0, 10.0], [1.0, 0.5]])
    guard, lot = Guard(8, clip=1.0, noise=2.0), torch.tensor(4.0)
    short = gradient(guard, quadratic, w, batch_of(x), lot)
    padded = torch.cat([x, torch.tensor([[math.nan, 3.0], [1e9, 2.0]])])
    long = gradient(guard, quadratic, w, batch_of(padded, [1.0, 1.0, 0.0, NOBODY_DRAWN]), lot)
    assert torch.equal(short[0]["w"], long[0]["w"])
    assert torch.equal(short[1], long[1])


def test_noise_has_the_scale_of_the_clip_over_the_lot_and_is_there_when_nobody_was_drawn():
    w = {"w": torch.zeros(20_000), "v": torch.zeros(())}
    nobody = Batch(torch.zeros(1, 1), torch.zeros(1), torch.tensor([NOBODY_DRAWN]), torch.tensor(11))
    guard, lot = Guard(8, clip=3.0, noise=2.0), torch.tensor(4.0)

    def objective(params, batch):
        loss = (params["w"].sum() + params["v"]) * batch.x.sum()
        return loss, loss

    first = gradient(guard, objective, w, nobody, lot)[0]["w"]
    assert float(first.std()) == pytest.approx(3.0 * 2.0 / 4.0, rel=0.02)
    assert abs(float(first.mean())) < 4 * 1.5 / math.sqrt(20_000)
    assert float((first.abs() < 1.5).float().mean()) == pytest.approx(0.6827, abs=0.015)
    assert torch.equal(first, gradient(guard, objective, w, nobody, lot)[0]["w"])  # seeded
    for other in (
        gradient(guard, objective, w, nobody, lot, 1),
        gradient(guard, objective, w, nobody._replace(key=torch.tensor(12)), lot),
        gradient(guard, lambda p, b: objective({"w": p["u"], "v": p["v"]}, b), {"u": w["w"], "v": w["v"]}, nobody, lot),
    ):
        leaf = other[0].get("w", other[0].get("u"))
        both = torch.stack([first, leaf])
        assert abs(float(torch.corrcoef(both)[0, 1])) < 0.03  # other draws, keys and models have noise of their own


def problem():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(12, 4), torch.randint(3, (12,))
    index = torch.stack([torch.randperm(12) for _ in range(3)])[:, None]
    batches = Batches(x, y, index, torch.ones(3, 1, 12), torch.arange(3)[:, None], torch.tensor(12.0))
    return Task(module, num_classes=3), batches


@pytest.mark.parametrize("optimizer", [SGD(0.1), SGD(0.1, 0.9, 0.01), Adam(0.01), AdamW(0.01)])
def test_no_noise_and_no_clip_is_ordinary_training(optimizer):
    task, batches = problem()
    start = task.init()
    anchor = (tree.map(torch.zeros_like, start), torch.tensor(0.3))
    plain, loss = train(task, optimizer, start, batches, quadratic_penalty, anchor)
    private, told = train(task, Private(optimizer, FREE), start, batches, quadratic_penalty, anchor)
    for name in plain:
        torch.testing.assert_close(private[name], plain[name], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(told, loss)
    noisy = train(task, Private(optimizer, Guard(100)), start, batches, quadratic_penalty, anchor)[0]
    assert not torch.allclose(noisy["0.weight"], plain["0.weight"], atol=1e-4)


def test_a_step_by_a_gradient_of_ones_own_is_refused():
    optimizer = Private(SGD(0.1), Guard(4))
    with pytest.raises(ConfigError, match="gradients of its own"):
        optimizer.update({}, (), {})
    assert optimizer.lr == 0.1
    assert optimizer.steady_step() == SGD(0.1).steady_step()
    assert optimizer.unguarded == SGD(0.1)


def test_the_same_minibatch_again_has_other_noise():
    """What is trained twice on a minibatch, in one go, must not have the same noise twice: it would cancel."""
    task, batches = problem()
    still = Guard(100, clip=1e-6, noise=1e6)
    once, _ = train(task, Private(SGD(1.0), still), task.init(), batches.epoch(0))
    twice, _ = train(task, Private(SGD(1.0), still), task.init(), batches.epoch(0).repeated(2))
    start = task.init()
    first = {name: once[name] - start[name] for name in once}
    second = {name: twice[name] - once[name] for name in once}
    cosine = tree.dot(first, second) / (length(first) * length(second))
    assert abs(float(cosine)) < 0.4


def test_a_mean_loss_is_clipped_and_noised():
    task, batches = problem()
    exact = mean_loss(task, task.init(), batches.epoch(0))
    guard = Guard(100, sum_noise=0.0, clip_loss=100.0)
    torch.testing.assert_close(mean_loss(task, task.init(), batches.epoch(0), guard), exact)
    low = Guard(100, sum_noise=0.0, clip_loss=0.01)
    assert float(mean_loss(task, task.init(), batches.epoch(0), low)) == pytest.approx(0.01)
    loud = Guard(100, sum_noise=2.0, clip_loss=0.5)
    drawn = torch.tensor([float(mean_loss(task, task.init(), batches.epoch(0), loud, k)) for k in range(300)])
    assert float(drawn.min()) >= 0
    assert float(drawn[drawn > 0].max()) < 0.5 + 5 * 2.0 * 0.5 / 12


def test_noise_of_the_operating_system_is_normal_and_never_the_same():
    one, other = (privacy.system_normals(torch.zeros(101, 99)) for _ in range(2))
    assert one.shape == (101, 99)
    assert not torch.equal(one, other)
    assert float(one.std()) == pytest.approx(1, abs=0.04)
    assert abs(float(one.mean())) < 0.05
    guard = Guard(8, entropy="system")
    like = {"w": torch.zeros(4)}
    assert not torch.equal(
        privacy.noise_like(guard, torch.tensor(1), like, 0)["w"],
        privacy.noise_like(guard, torch.tensor(1), like, 0)["w"],
    )
