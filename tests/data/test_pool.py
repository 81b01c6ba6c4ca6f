import numpy as np
import pytest
import torch

from coterie.core.errors import CoterieWarning, DataError
from coterie.data import Pool, federate


def pool(size=40, owners=4, **others):
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.integers(256, size=(size, 1, 3, 3)).astype(np.uint8))
    y = torch.from_numpy(draw.integers(2, size=size))
    owner = np.arange(size) % owners
    return Pool("p", x, y, 2, ("a", "b"), owner, tuple(f"writer {i}" for i in range(owners)), **others)


def parts_of(pool):
    return [np.flatnonzero(pool.owner == i) for i in range(len(pool.owners))]


def test_nothing_is_copied_and_everything_dealt_once():
    data = pool()
    federation = federate(data, parts_of(data), seed=0)
    assert federation.x is data.x
    assert federation.y is data.y
    assert federation.classes == ("a", "b")
    for i, split in enumerate(federation.clients.values()):
        own = np.sort(np.concatenate([split.train, split.validation, split.test]))
        assert np.array_equal(own, np.flatnonzero(data.owner == i))


def test_clients_are_called_after_their_owners_where_they_have_one():
    data = pool()
    assert federate(data, parts_of(data), seed=0).names == ("writer 0", "writer 1", "writer 2", "writer 3")
    assert federate(data, np.split(np.arange(40), 2), seed=0).names == ("client-1", "client-2")
    assert federate(data, {"x": np.arange(20)}, seed=0).names == ("x",)


def test_the_published_test_examples():
    data = pool(published_test=np.arange(40) >= 28)
    for i, split in enumerate(federate(data, parts_of(data), seed=0, published=True).clients.values()):
        own = np.flatnonzero(data.owner == i)
        assert np.array_equal(split.test, own[own >= 28])
        assert np.array_equal(np.sort(np.concatenate([split.train, split.validation])), own[own < 28])
        assert len(split.validation) == 1
    with pytest.raises(DataError, match="'x' has no published test examples"):
        federate(data, {"x": np.arange(10)}, seed=0, published=True)
    with pytest.raises(DataError, match="p has no published test examples: use --split random"):
        federate(pool(), [np.arange(40)], seed=0, published=True)


def test_test_examples_that_are_trained_on_are_told_and_can_be_left_out():
    data = pool()
    data.x[1:20] = data.x[0]
    with pytest.warns(CoterieWarning, match=r"p: \d+ of 12 test examples are identical to a training example"):
        federate(data, [np.arange(40)], seed=0)
    kept = data.without_duplicates()
    assert kept.tolist() == [0, *range(20, 40)]
    federate(data, [kept], seed=0)  # warns no more: a warning fails this test


def test_each_client_is_put_on_its_own_scale():
    x = torch.randn(60, 3) * torch.tensor([1.0, 50.0, 0.0]) + 7
    x[30:] *= 100
    data = Pool("p", x, torch.arange(60) % 2, 2, standardize=True)
    federation = federate(data, [np.arange(30), np.arange(30, 60)], seed=0)
    for split in federation.clients.values():
        train = federation.x[torch.from_numpy(split.train)]
        torch.testing.assert_close(train.mean(0), torch.zeros(3), rtol=0, atol=1e-4)
        torch.testing.assert_close(train.std(0, correction=0)[:2], torch.ones(2), rtol=1e-4, atol=0)
    assert torch.equal(data.x, x)


def test_lengths_must_fit():
    with pytest.raises(DataError, match="3 inputs but 2 targets"):
        Pool("p", torch.zeros(3, 1), torch.zeros(2), 2)
    with pytest.raises(DataError, match="no client has any data"):
        federate(pool(), [], seed=0)
