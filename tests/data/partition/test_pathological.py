import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.errors import DataError
from coterie.data.partition import classes, shards

from .kit import check, labelled, outcome, same, seeds


@given(
    labels=labelled(), clients=st.integers(0, 12), number=st.integers(0, 9), each=st.none() | st.integers(0, 6),
    seed=seeds,
)  # fmt: skip
@settings(deadline=None, max_examples=150)
def test_every_client_has_its_classes(labels, clients, number, each, seed):
    kinds, sizes = np.unique(labels, return_counts=True)
    illegal = not (clients >= 1 and len(labels) >= clients and 1 <= number <= len(kinds) and each != 0)
    parts, refusal = outcome(lambda: classes(labels, clients, number, seed, each))
    if parts is None:
        # Refused: illegal, or a class that more clients drew than it can serve.
        assert illegal or ("this partition needs" in refusal and sizes.min() < clients * (each or 1))
        return
    assert not illegal
    check(parts, len(labels), clients, number)
    for part in parts:
        have, counts = np.unique(labels[part], return_counts=True)
        assert len(have) == number
        assert each is None or set(counts) == {each}
    if each is None:  # a class is used whole, evenly, by those that drew it
        for kind, size in zip(kinds, sizes, strict=True):
            counts = [n for part in parts if (n := int((labels[part] == kind).sum()))]
            assert sum(counts) in (0, size)
            assert not counts or max(counts) - min(counts) <= 1
    assert same(parts, classes(labels, clients, number, seed, each))


def test_pfedvmps_three_classes_of_a_hundred():
    labels = np.repeat(np.arange(10), 6_000)
    parts = classes(labels, 50, 3, 0, each=100)
    check(parts, len(labels), 50)
    assert {len(part) for part in parts} == {300}
    assert len({tuple(np.unique(labels[part])) for part in parts}) > 20  # no groups of clients


@given(labels=labelled(), clients=st.integers(0, 12), number=st.integers(0, 5), seed=seeds)
@settings(deadline=None, max_examples=80)
def test_shards_use_every_example_once(labels, clients, number, seed):
    if clients < 1 or number < 1 or len(labels) < clients * number:
        with pytest.raises(DataError, match=r"at least one|use fewer clients"):
            shards(labels, clients, number, seed)
        return
    parts = shards(labels, clients, number, seed)
    assert len(check(parts, len(labels), clients)) == len(labels)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= number
    assert same(parts, shards(labels, clients, number, seed))


def test_shards_that_divide_the_classes_give_few_classes():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60))
    for part in shards(labels, 15, 2, 0):  # 30 shards of 20, three a class
        assert len(part) == 40
        assert len(np.unique(labels[part])) <= 2
