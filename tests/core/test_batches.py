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


def test_paces_go_with_their_minibatches():
    """And what only adds up over examples has none."""
    paced = batches()._replace(pace=torch.arange(6.0).reshape(2, 3))
    assert float(paced.total_pace()) == 0 + 1 + 3 + 4
    assert float(paced.top_pace()) == 4
    assert int(batches().total_pace()) == 4
    assert batches().top_pace() == 1
    assert float(paced.first_steps(3).total_pace()) == 0 + 1 + 3
    assert paced.epoch(1).pace.tolist() == [[3, 4, 5]]
    assert paced.repeated(2).pace[:, 0].tolist() == [0, 3, 0, 3]
    assert paced.repeated_with_new_keys(2).pace[:, 0].tolist() == [0, 0, 3, 3]
    pairs = paced.paired()
    assert pairs.pace[0, pairs.mask[0].any(-1)].tolist() == [0, 1, 3, 4]
    assert paced.whole(4).pace.tolist() == [[0], [3]]
    assert paced.merged(4).pace == ()
    assert float(paced.batch().pace) == 0
    first, second = Batch(*[torch.arange(4.0)] * 3, torch.tensor(7), torch.tensor(0.5)).halves()
    assert first.pace == second.pace == 0.5


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


def numbered(drawn, labels, mask=None) -> Batches:
    """One epoch of two minibatches with the positions `drawn`; `labels` are those of positions 0, 1, ..."""
    index = torch.tensor(drawn).reshape(1, 2, -1)
    mask = torch.ones(index.shape) if mask is None else torch.tensor(mask, dtype=torch.float32).reshape(index.shape)
    x = torch.arange(len(labels), dtype=torch.float32)
    return Batches(x, torch.tensor(labels), index, mask, torch.tensor([[5, 6]]), torch.tensor(float(index.numel())))


def test_whole_has_every_example_once_in_the_order_of_the_pool():
    batch = numbered([7, 2, 9, 4, 2, 0], [0] * 10, [1, 1, 2, 1, 1, 0]).whole(8).batch()
    assert batch.mask.tolist() == [1, 1, 1, 2, 0, 0, 0, 0]  # 2 was drawn twice, 0 is masked
    assert batch.x.tolist() == [2, 4, 7, 9, 2, 4, 7, 9]  # padding repeats the others
    assert batch.key == 5


def test_whole_does_not_depend_on_the_order_or_on_padding():
    one = numbered([7, 2, 9, 4], [0] * 10).whole(6)
    other = numbered([4, 9, 2, 7, 1, 1], [0] * 10, [1, 1, 1, 1, 0, 0]).whole(6)
    for field in ("index", "mask", "key"):
        assert torch.equal(getattr(one, field), getattr(other, field))


def test_whole_takes_of_every_class_its_share():
    labels = [0] * 8 + [1] * 4 + [2] * 2
    drawn = torch.randperm(14, generator=torch.Generator().manual_seed(1)).tolist()
    batch = numbered(drawn, labels).whole(7).batch()
    assert batch.y.bincount().tolist() == [4, 2, 1]
    assert sorted(batch.x.tolist()) == batch.x.tolist()
    # Those of a class are the first that were drawn, so that another epoch takes others.
    assert set(batch.x[batch.y == 1].tolist()) == set([each for each in drawn if 8 <= each < 12][:2])
    assert numbered(drawn, labels).whole(3).batch().y.tolist() == [0, 1, 2]  # one of each comes first


def test_whole_without_classes_takes_the_first():
    batches = numbered([5, 3, 1, 0], [0] * 6)
    assert batches._replace(y=torch.randn(6)).whole(2).index.tolist() == [[[3, 5]]]


def test_whole_of_each_epoch_and_of_none():
    two = batches().whole(4)
    assert two.index.tolist() == [[[10, 11, 10, 11]], [[13, 14, 13, 14]]]
    assert two.key.tolist() == [[0], [3]]
    assert batches().epoch(0, 0).whole(4).index.shape == (0, 1, 4)


def test_whole_of_stacked_clients_is_that_of_each():
    each = [numbered([7, 2, 9, 4], [0, 1] * 5), numbered([1, 3, 0, 0], [0, 1] * 5, [1, 1, 1, 0])]
    stacked = Batches(each[0].x, each[0].y, *(torch.stack(part) for part in list(zip(*each, strict=True))[2:6]))
    found = torch.func.vmap(lambda own: own.whole(3), in_dims=(Batches(None, None, 0, 0, 0, 0),))(stacked)
    for i, one in enumerate(each):
        assert torch.equal(found.index[i], one.whole(3).index)
        assert torch.equal(found.mask[i], one.whole(3).mask)


def test_only_the_first_examples_of_whole_may_be_real():
    assert numbered([7, 2, 9, 4], [0] * 10).filled(128) == 32
    assert numbered([7, 2, 9, 4], [0] * 10).filled(20) == 20
    assert batches().filled(128) == 32


def test_repeated_epochs_have_keys_of_their_own():
    twice = batches().repeated_with_new_keys(2)
    assert twice.index.tolist() == [epoch for epoch in batches().index.tolist() for _ in range(2)]
    assert twice.key[0].tolist() == [0, 1, 2]
    assert len(set(twice.key.flatten().tolist())) == 12
