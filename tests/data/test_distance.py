import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coterie.data import from_clients
from coterie.data.distance import class_counts, input_distances, label_distances, label_distances_by_chance


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


def test_chance_is_what_dealing_the_labels_out_gives():
    draw = np.random.default_rng(0)
    few, many = (label_distances_by_chance(np.full((4, 2), size), draw, repeats=400) for size in (5, 500))
    # The distance of a site with n of N labels, half of each class: E|hypergeometric / n - 1/2|.
    n, total = 10, 40
    sd = np.sqrt(0.25 / n * (total - n) / (total - 1))
    assert few.mean() == pytest.approx(np.sqrt(2 / np.pi) * sd, rel=0.1)
    assert many.mean() < few.mean() / 8
    apart = np.array([[10, 0], [0, 10]])
    assert label_distances(apart).from_all.min() > 2 * label_distances_by_chance(apart, draw).max()


def test_inputs_are_compared_in_standard_deviations_beside_chance():
    draw = torch.Generator().manual_seed(0)
    x = [torch.randn(400, 6, generator=draw) * torch.tensor([1.0, 1, 1, 1, 1, 50]) for _ in range(4)]
    same = from_clients([(each, torch.zeros(400).long()) for each in x])
    away, chance = input_distances(same)
    np.testing.assert_allclose(chance, np.sqrt(1 / 400 - 1 / 1600))
    assert (away < 2 * chance).all()
    x[0][:, 5] += 100  # two of its standard deviations
    moved = from_clients([(torch.cat([each, torch.ones(400, 1)], 1), torch.zeros(400).long()) for each in x])
    away, chance = input_distances(moved, ("train", "validation"))
    assert away[0] > 5 * chance[0]
    assert away[0] > 2 * away[1]
