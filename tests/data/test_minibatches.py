from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.schedules import Cosine, Pacing
from coterie.data import Federation, Split
from coterie.data.minibatches import Plan, draw, pad_positions


def federation(sizes):
    clients, start = {}, 0
    for i, size in enumerate(sizes):
        clients[f"c{i}"] = Split(np.arange(start, start + size), np.array([start]), np.array([start]))
        start += size
    return Federation("f", torch.arange(start, dtype=torch.float32)[:, None], torch.zeros(start).long(), clients, 2)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5), batch=st.integers(1, 16), epochs=st.integers(1, 3),
       number=st.integers(1, 9))  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_every_epoch_holds_every_example_once(sizes, batch, epochs, number):
    data = federation(sizes)
    batches = draw(data, list(range(len(sizes))), Plan(batch, epochs), seed=0, purpose="t", round=number)
    for row, size in enumerate(sizes):
        own = data.split(row).train
        assert np.isin(batches.index[row].numpy(), own).all(), "padding too points at the client's own data"
        for epoch in range(epochs):
            used = batches.index[row, epoch][batches.mask[row, epoch] > 0]
            assert sorted(used.tolist()) == own.tolist()
        assert batches.count[row] == size
        steps = int(batches.mask[row].any(-1).sum())
        assert steps == Plan(batch, epochs).num_steps(size)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4), batch=st.integers(1, 16), steps=st.integers(1, 20))
@settings(deadline=None, max_examples=40)
def test_a_fixed_number_of_steps(sizes, batch, steps):
    data = federation(sizes)
    batches = draw(data, list(range(len(sizes))), Plan(batch, steps=steps), seed=0, purpose="t", round=1)
    assert batches.mask.shape[1:3] == (1, steps)
    assert batches.mask.any(-1).all(), "every client takes every step"
    for row, size in enumerate(sizes):
        a_pass = -(-size // batch)
        for start in range(0, steps - a_pass + 1, a_pass):  # each whole pass has every example once
            part = slice(start, start + a_pass)
            used = batches.index[row, 0, part][batches.mask[row, 0, part] > 0]
            assert sorted(used.tolist()) == data.split(row).train.tolist()


def test_a_clients_minibatches_do_not_depend_on_its_company():
    data = federation([5, 17, 30])
    alone = draw(data, [1], Plan(4, 2), seed=3, purpose="t", round=2)
    together = draw(data, [2, 1, 0], Plan(4, 2), seed=3, purpose="t", round=2)
    steps = alone.index.shape[2]
    assert torch.equal(alone.index[0], together.index[1, :, :steps])
    assert torch.equal(alone.key[0], together.key[1, :, :steps])
    assert not together.mask[1, :, steps:].any()


def test_draws_differ_between_rounds_purposes_seeds_and_clients():
    data = federation([30, 30])
    base = draw(data, [0, 1], Plan(4), seed=0, purpose="t", round=1)
    assert not torch.equal(base.index[0], base.index[1] - 30)
    for change in ({"seed": 1}, {"purpose": "u"}, {"round": 2}):
        other = draw(data, [0, 1], Plan(4), **{"seed": 0, "purpose": "t", "round": 1, **change})
        assert not torch.equal(base.index, other.index), change


def test_no_minibatch_is_wider_than_the_largest_client():
    batches = draw(federation([3, 5]), [0], Plan(1000), seed=0, purpose="t", round=1)
    assert batches.index.shape == (1, 1, 1, 5)
    assert batches.mask[0, 0, 0].tolist() == [1, 1, 1, 0, 0]


def test_no_epochs_is_no_steps():
    assert draw(federation([3]), [0], Plan(2, epochs=0), seed=0, purpose="t", round=1).index.shape[1] == 0


def test_positions_are_padded_with_their_own():
    padded = pad_positions([np.array([4, 5, 6]), np.array([9])])
    assert padded.tolist() == [[4, 5, 6], [9, 9, 9]]


def test_a_width_that_is_too_small_is_not_written_beyond():
    """A client that has more than it was told all have at most."""
    batches = draw(federation([50]), [0], Plan(8, width=3), seed=0, purpose="t", round=1)
    assert batches.index.shape == (1, 1, 7, 3)


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4), batch=st.integers(1, 16), epochs=st.integers(1, 2),
       share=st.floats(0.01, 0.9))  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_withheld_examples_are_in_no_minibatch(sizes, batch, epochs, share):
    data, plan = federation(sizes), Plan(batch, epochs, withheld=share)
    batches = draw(data, list(range(len(sizes))), plan, seed=0, purpose="t", round=1)
    for row, size in enumerate(sizes):
        out = batches.withheld.index[row][batches.withheld.mask[row] > 0].tolist()
        assert len(out) == min(max(1, round(share * size)), size - 1), "at least one, and never all"
        rest = sorted(set(data.split(row).train.tolist()) - set(out))
        for epoch in range(epochs):
            used = batches.index[row, epoch][batches.mask[row, epoch] > 0]
            assert sorted(used.tolist()) == rest
        assert np.isin(batches.index[row].numpy(), rest).all(), "nor does padding show them"
        assert batches.count[row] == len(rest)
        assert int(batches.mask[row].any(-1).sum()) == plan.num_steps(size)


def test_withheld_examples_belong_to_the_client_and_the_seed():
    """They are the same in every round and purpose, whatever the plan and the company."""
    data = federation([20, 30, 50])

    def out(ids, seed=0, purpose="t", round=1, plan=None):
        drawn = draw(data, ids, plan or Plan(4, withheld=0.3), seed=seed, purpose=purpose, round=round).withheld
        return [drawn.index[row][drawn.mask[row] > 0].tolist() for row in range(len(ids))]

    first = out([1])
    assert first == out([1], purpose="u", round=7) == [out([2, 1, 0])[1]]
    assert first == out([1], plan=Plan(16, steps=3, withheld=0.3)) == out([1], plan=Plan(4, epochs=0, withheld=0.3))
    assert first != out([1], seed=1)
    assert draw(data, [1], Plan(4), seed=0, purpose="t", round=1).withheld == ()


def test_withheld_examples_count_their_class_weights():
    data = federation([20])
    weights = torch.arange(20.0)
    drawn = draw(replace(data, weights=weights), [0], Plan(4, withheld=0.3), seed=0, purpose="t", round=1).withheld
    plain = draw(data, [0], Plan(4, withheld=0.3), seed=0, purpose="t", round=1).withheld
    assert torch.equal(drawn.mask, plain.mask * weights[plain.index])


def test_each_minibatch_has_the_pace_of_its_own_step():
    """Of 2 epochs of 3 and of 1 minibatches: 6 steps and 2, each at its share of the round; 1 for padding."""
    pacing = Pacing(Cosine(per="step"), 10)
    data, plan = federation([12, 4]), Plan(batch_size=4, epochs=2, pacing=pacing)
    drawn = draw(data, [0, 1], plan, seed=0, purpose="minibatches", round=3)
    np.testing.assert_array_equal(drawn.pace[0].numpy().ravel(), pacing.paces(3, 6))
    np.testing.assert_array_equal(drawn.pace[1, :, 0].numpy(), pacing.paces(3, 2))
    assert bool((drawn.pace[1, :, 1:] == 1).all())
    alone = draw(data, [1], plan, seed=0, purpose="minibatches", round=3)
    np.testing.assert_array_equal(alone.pace[0, :, 0].numpy(), drawn.pace[1, :, 0].numpy())
    steps = draw(data, [0, 1], replace(plan, steps=5), seed=0, purpose="minibatches", round=3).pace
    np.testing.assert_array_equal(steps.numpy(), np.tile(pacing.paces(3, 5), (2, 1, 1)))
    assert draw(data, [0], replace(plan, pacing=None), seed=0, purpose="minibatches", round=3).pace == ()
