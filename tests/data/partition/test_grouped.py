import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core import rng
from coterie.core.errors import DataError
from coterie.data.partition import FEDAMP, Group, groups, practical
from coterie.data.partition.grouped import equal_groups
from coterie.data.partition.skew import label_groups

from .kit import check, labelled, outcome, same, seeds


@given(labels=labelled(), clients=st.integers(0, 12), number=st.integers(0, 9), seed=seeds)
@settings(deadline=None, max_examples=120)
def test_groups_have_disjoint_labels(labels, clients, number, seed):
    kinds = np.unique(labels)
    illegal = not (1 <= clients <= len(labels) and 1 <= number <= len(kinds))
    parts, refusal = outcome(lambda: groups(labels, clients, number, seed))
    if parts is None:
        assert illegal or "of one label group" in refusal
        return
    assert not illegal
    check(parts, len(labels), clients)
    sets = [set(kinds) for kinds in label_groups(labels, number, rng.generator(seed, "partition", "groups"))]
    for part in parts:
        assert sum(set(labels[part]) <= kinds for kinds in sets) == 1
    # A group's labels are used whole.
    for kind in kinds:
        assert sum((labels[part] == kind).sum() for part in parts) in (0, (labels == kind).sum())
    assert same(parts, groups(labels, clients, number, seed))


def test_federicos_groups_split_the_classes_almost_evenly():
    labels = np.repeat(np.arange(10), 500)
    parts = groups(labels, 8, 4, 0)
    seen = {tuple(np.unique(labels[part])) for part in parts}
    assert {len(each) for each in seen} <= {2, 3}
    assert len(seen) >= 2
    for one in seen:
        assert all(one == other or not set(one) & set(other) for other in seen)


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6), seed=seeds, clients=st.integers(0, 3),
    size=st.integers(0, 30), dominant=st.floats(0.05, 0.95), cut=st.integers(1, 5),
)  # fmt: skip
@settings(deadline=None, max_examples=120)
def test_practical_clients_have_their_sizes_and_dominating_classes(sizes, seed, clients, size, dominant, cut):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    which = [
        Group(clients, tuple(range(min(cut, len(sizes)))), size),
        Group(1, tuple(range(min(cut, len(sizes)), len(sizes))), 7),
    ]
    illegal = clients < 1 or size < 1 or cut >= len(sizes)
    parts, refusal = outcome(lambda: practical(labels, which, seed, dominant))
    if parts is None:
        assert illegal or "this partition needs" in refusal
        return
    assert not illegal
    check(parts, len(labels), clients + 1)
    for part, group in zip(parts, [which[0]] * clients + [which[1]], strict=True):
        assert len(part) == group.size
        counts = np.bincount(labels[part], minlength=len(sizes))
        main = np.isin(np.arange(len(sizes)), group.classes)
        assert counts[main].sum() == round(dominant * group.size)
        for side in (counts[main], counts[~main]):
            assert side.max() - side.min() <= 1
    assert same(parts, practical(labels, which, seed, dominant))


def pool(*sizes):
    return np.repeat(np.arange(len(sizes)), sizes)


@pytest.mark.parametrize(
    ("name", "labels", "clients"),
    [
        ("fedamp-emnist", pool(*[2_300] * 62), 62),  # the rarest class of EMNIST byclass has 2,2xx
        ("fedamp-mnist", pool(6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958), 62),
        ("fedamp-fmnist", pool(*[7_000] * 10), 62),
        ("fedamp-cifar100", pool(*[600] * 100), 100),
    ],
)
def test_fedamps_settings_fit_their_data(name, labels, clients):
    parts = practical(labels, FEDAMP[name], 0)
    check(parts, len(labels), clients)
    sizes = [group.size for group in FEDAMP[name] for _ in range(group.clients)]
    assert [len(part) for part in parts] == sizes
    for part in parts:
        assert len(np.unique(labels[part])) >= 0.6 * len(np.unique(labels))


def test_fedamps_emnist_is_the_papers():
    """Clients 0-9: 1000 for training from digits, 10-35: 700 from capitals, 36-61: 400 from small letters; 100 to
    test, 80 % from the dominating classes."""
    labels = pool(*[2_300] * 62)
    parts = practical(labels, FEDAMP["fedamp-emnist"], 0)
    for client, part in enumerate(parts):
        low, high, train = (0, 10, 1000) if client < 10 else (10, 36, 700) if client < 36 else (36, 62, 400)
        assert len(part) == train + 100
        assert ((labels[part] >= low) & (labels[part] < high)).mean() == pytest.approx(0.8, abs=0.001)


def test_illegal_groups_are_refused_in_words():
    labels = pool(50, 50)
    for which, words in (
        ([Group(1, (0, 1), 5)], "has all classes as dominating"),
        ([Group(1, (7,), 5)], "no class 7"),
        ([Group(9, (0,), 20)], "class 0 has 50 examples, but this partition needs 144"),
    ):
        with pytest.raises(DataError, match=words):
            practical(labels, which, 0)
    with pytest.raises(DataError, match="between 0 and 1"):
        practical(labels, [Group(1, (0,), 5)], 0, dominant=1.0)
    with pytest.raises(DataError, match="cannot form 3 groups"):
        equal_groups(labels, 4, 3, [5])
    with pytest.raises(DataError, match="one for each of the 2 groups"):
        equal_groups(labels, 4, 2, [5, 6, 7])
