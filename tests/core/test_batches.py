import torch

from coterie.core.batches import Batch, Batches, Withheld


def batches() -> Batches:
    """Two epochs of three steps, of which the last is padding; minibatches 10, 11 and then 13, 14."""
    index = torch.tensor([[[10, 10], [11, 11], [0, 0]], [[13, 13], [14, 14], [0, 0]]])
    mask = torch.tensor([[[1.0, 1], [1, 0], [0, 0]], [[1, 1], [1, 0], [0, 0]]])
    return Batches(torch.zeros(20), torch.zeros(20), index, mask, torch.arange(6).reshape(2, 3), torch.tensor(3.0))


def test_pairs_are_each_minibatch_and_the_next_one_of_the_same_client():
    pairs = batches().paired()
    used = pairs.mask[0].any(-1)
    assert used.tolist() == [True] * 4 + [False] * 2
    assert pairs.index[0, used][:, [0, 2]].tolist() == [[10, 11], [11, 13], [13, 14], [14, 10]]
    assert pairs.mask[0, 0].tolist() == [1, 1, 1, 0]
    assert pairs.key[0, used].tolist() == [0, 1, 3, 4]


def test_one_minibatch_is_paired_with_itself_and_none_stays_none():
    one = batches().first_steps(1).paired()
    assert one.index[0, 0].tolist() == [10, 10, 10, 10]
    assert one.mask[0].any(-1).tolist() == [True] + [False] * 5
    assert not batches().first_steps(0).paired().mask.any()
    assert batches().epoch(0, 0).paired().index.shape == (1, 0, 4)


def test_repeated_epochs_come_one_after_the_other():
    twice = batches().repeated(2)
    assert torch.equal(twice.index, torch.cat([batches().index] * 2))
    assert twice.epoch(2).key.tolist() == batches().epoch(0).key.tolist()
    assert twice.mask.sum() == 2 * batches().mask.sum()
    assert twice.count == batches().count


def test_first_counts_the_clients_own_minibatches():
    used = batches().first_steps(3).mask.any(-1)
    assert used.tolist() == [[True, True, False], [True, False, False]]
    torch.testing.assert_close(batches().first_steps(9).mask, batches().mask)


def test_halves():
    first, second = Batch(torch.arange(4), torch.arange(4) + 4, torch.tensor([1, 1, 1, 0]), torch.tensor(7)).halves()
    assert (first.x.tolist(), second.x.tolist()) == ([0, 1], [2, 3])
    assert (first.y.tolist(), second.mask.tolist()) == ([4, 5], [1, 0])
    assert first.key != second.key


def test_wider_minibatches_have_the_same_examples():
    wide = batches().merged(5)  # two minibatches of two
    assert wide.index.shape == wide.mask.shape == (2, 2, 4)
    assert wide.index[wide.mask > 0].tolist() == [10, 10, 11, 13, 13, 14]
    assert wide.key.tolist() == [[0, 2], [3, 5]]
    torch.testing.assert_close(batches().merged(1).index, batches().index)
    assert batches().merged(100).index.shape == (2, 1, 100)
    assert batches().epoch(0, 0).merged(5).index.shape == (0, 2, 4)


def test_withheld_examples_are_minibatches_of_their_own():
    plain = batches()
    assert plain.of_withheld().index.shape == (0, *plain.index.shape[1:]), "there is no epoch of nothing"
    part = Withheld(torch.tensor([[[3, 4], [5, 3]]]), torch.tensor([[[1.0, 1.0], [1.0, 0.0]]]))
    out = plain._replace(withheld=part).of_withheld()
    assert torch.equal(out.index, part.index)
    assert torch.equal(out.mask, part.mask)
    assert out.key.shape == (1, 2)
    assert out.withheld == ()
