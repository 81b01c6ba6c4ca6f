import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coterie.data import from_clients
from coterie.data.distance import class_counts, label_distances


def test_distances_by_hand():
    """Shares (1, 0), (1/2, 1/2), (0, 1); together (3/8, 5/8)."""
    found = label_distances(np.array([[2, 0], [1, 1], [0, 4]]))
    assert found.between.tolist() == [0.5, 1.0, 0.5]
    assert found.from_all.tolist() == [0.625, 0.125, 0.375]


@given(counts=arrays(np.int64, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=st.integers(0, 50)))
@settings(deadline=None, max_examples=60)
def test_distances_are_between_zero_and_one_and_do_not_see_sizes(counts):
    counts[:, 0] += 1  # nobody has nothing
    found = label_distances(counts)
    assert len(found.between) == len(counts) * (len(counts) - 1) // 2
    for values in (found.between, found.from_all):
        assert ((values >= 0) & (values <= 1 + 1e-12)).all()
    np.testing.assert_allclose(label_distances(counts * 7).between, found.between)
    np.testing.assert_allclose(label_distances(np.repeat(counts[:1], 3, 0)).between, 0, atol=1e-12)


def test_counts_are_those_of_all_parts():
    labels = [torch.tensor([0] * 6 + [2] * 4), torch.tensor([1] * 5)]
    data = from_clients([(torch.zeros(len(y), 2), y) for y in labels], num_classes=4)
    assert class_counts(data).tolist() == [[6, 0, 4, 0], [0, 5, 0, 0]]


def test_one_client_has_no_pairs():
    found = label_distances(np.array([[3, 1]]))
    assert len(found.between) == 0
    assert found.from_all == pytest.approx([0])
