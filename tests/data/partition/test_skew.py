import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.errors import DataError
from coterie.data.partition import clusters, dirichlet

from .kit import check, labelled, same, seeds

alphas = st.sampled_from([1e-8, 0.01, 0.1, 1.0, 100.0])


@given(labels=labelled(), clients=st.integers(1, 12), seed=seeds, alpha=alphas, least=st.integers(1, 30))
@settings(deadline=None, max_examples=80)
def test_dirichlet_uses_every_example_once_and_ends(labels, clients, seed, alpha, least):
    if len(labels) < clients * least:
        with pytest.raises(DataError, match="use fewer clients"):
            dirichlet(labels, clients, alpha, seed, least)
        return
    parts = dirichlet(labels, clients, alpha, seed, least)
    assert len(check(parts, len(labels), clients, least)) == len(labels)
    assert same(parts, dirichlet(labels, clients, alpha, seed, least))


@given(
    labels=labelled(), clients=st.integers(1, 12), number=st.integers(0, 9), seed=seeds, alpha=alphas,
    least=st.integers(1, 20),
)  # fmt: skip
@settings(deadline=None, max_examples=80)
def test_clusters_use_every_example_once_and_end(labels, clients, number, seed, alpha, least):
    if len(labels) < clients * least or not 1 <= number <= len(np.unique(labels)):
        with pytest.raises(DataError, match=r"use fewer clients|groups"):
            clusters(labels, clients, number, alpha, seed, least)
        return
    parts = clusters(labels, clients, number, alpha, seed, least)
    assert len(check(parts, len(labels), clients, least)) == len(labels)
    assert same(parts, clusters(labels, clients, number, alpha, seed, least))


def test_classes_of_a_cluster_go_together():
    """With a tiny alpha a cluster goes to one client: as many clients as clusters have more than was topped up."""
    labels = np.repeat(np.arange(12), 100)
    parts = clusters(labels, 10, 3, 1e-6, 0, min_size=1)
    large = [part for part in parts if len(part) > 1]
    assert 1 <= len(large) <= 3
    for part in large:
        assert len(np.unique(labels[part])) % 4 == 0


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_alpha_is_above_zero(alpha):
    for deal in (lambda: dirichlet(np.zeros(9), 2, alpha, 0, 1), lambda: clusters(np.zeros(9), 2, 1, alpha, 0, 1)):
        with pytest.raises(DataError, match="alpha must be above 0"):
            deal()


def test_small_alpha_concentrates_classes():
    labels = np.repeat(np.arange(10), 100)

    def classes_a_client(alpha):
        return np.mean([len(np.unique(labels[part])) for part in dirichlet(labels, 10, alpha, 0, 1)])

    assert classes_a_client(0.05) < 4 < 9 < classes_a_client(100)
