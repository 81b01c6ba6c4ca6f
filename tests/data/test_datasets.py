import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from coterie.core.errors import DataError
from coterie.data import from_clients
from coterie.data.datasets import gather

X, Y = torch.arange(24.0).reshape(12, 2), torch.arange(12) % 3


class Own(Dataset):
    """Counts how often an item is asked for."""

    def __init__(self, items):
        self.items, self.asked = items, 0

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        self.asked += 1
        return self.items[i]


def test_all_kinds_give_the_same_federation():
    pairs = [(X[:6], Y[:6]), (X[6:], Y[6:])]
    whole = TensorDataset(X, Y)
    loose = [Own([(x.numpy(), int(y)) for x, y in zip(*pair, strict=True)]) for pair in pairs]
    base = from_clients(pairs)
    for clients in (
        [TensorDataset(*pair) for pair in pairs],
        [Subset(whole, range(6)), Subset(Subset(whole, range(3, 12)), [3, 4, 5, 6, 7, 8])],
        loose,
        {"client-1": Subset(loose[0], range(6)), "client-2": pairs[1]},
    ):
        other = from_clients(clients)
        assert torch.equal(other.x, base.x)
        assert torch.equal(other.y, base.y)
        assert other.num_classes == 3
        assert [s.test.tolist() for s in other.clients.values()] == [s.test.tolist() for s in base.clients.values()]
    assert loose[1].asked == 6  # once each


def test_a_regression():
    assert from_clients([Own([(torch.zeros(2), 0.5)] * 5)]).kind == "regression"


class Stream(IterableDataset):
    def __iter__(self):
        yield X[0], Y[0]


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Stream(), "without a length"),
        (Own([]), "no examples"),
        (Own([X[0]] * 3), r"must be a pair \(x, y\)"),
        (Own([(X[0], Y[0]), (X[0, :1], Y[0])]), "do not make one tensor"),
        (Own([("a", "b"), ("c", "d")]), "pair of tensors or numbers"),
    ],
)
def test_what_cannot_be_used_is_named(dataset, words):
    with pytest.raises(DataError, match=f"client 'b'.*{words}"):
        gather("b", dataset)
