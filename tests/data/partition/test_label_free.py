import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.errors import DataError
from coterie.data.partition import iid, merged, natural, quantity, subsample

from .kit import check, same, seeds


@given(size=st.integers(1, 500), clients=st.integers(1, 20), seed=seeds)
@settings(deadline=None, max_examples=50)
def test_iid_uses_every_example_once(size, clients, seed):
    if size < clients:
        with pytest.raises(DataError, match="use fewer clients"):
            iid(size, clients, seed)
        return
    parts = iid(size, clients, seed)
    assert len(check(parts, size, clients)) == size
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(
    size=st.integers(1, 500), clients=st.integers(1, 20), seed=seeds,
    alpha=st.sampled_from([1e-8, 0.1, 1.0, 100.0]), least=st.integers(1, 30),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_quantity_skew_uses_every_example_once_and_ends(size, clients, seed, alpha, least):
    if size < clients * least:
        with pytest.raises(DataError, match="use fewer clients"):
            quantity(size, clients, alpha, seed, least)
        return
    parts = quantity(size, clients, alpha, seed, least)
    assert len(check(parts, size, clients, least)) == size
    assert same(parts, quantity(size, clients, alpha, seed, least))


def test_small_alpha_makes_sizes_unequal():
    def spread(alpha):
        return np.std([len(part) for part in quantity(10_000, 20, alpha, 0)]) / 500

    assert spread(0.1) > 1 > 0.1 > spread(1000)


@given(
    owners=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=60),
    clients=st.none() | st.integers(0, 7), least=st.integers(0, 8), seed=seeds,
)  # fmt: skip
@settings(deadline=None, max_examples=80)
def test_natural_silos_are_the_owners(owners, clients, least, seed):
    owner = np.array(owners)
    large = [name for name in np.unique(owner) if (owner == name).sum() >= max(least, 1)]
    if not large or (clients is not None and not 1 <= clients <= len(large)):
        with pytest.raises(DataError, match="owner"):
            natural(owner, clients, seed, least)
        return
    parts = natural(owner, clients, seed, least)
    check(parts, len(owner), len(large) if clients is None else clients)
    names = [str(owner[part[0]]) for part in parts]
    assert names == sorted(set(names))
    for part, name in zip(parts, names, strict=True):
        assert name in large
        assert np.array_equal(part, np.flatnonzero(owner == name))


@given(
    owners=st.lists(st.integers(0, 30), min_size=1, max_size=80), clients=st.integers(0, 8), least=st.integers(0, 4),
    alpha=st.sampled_from([1e-8, 0.5, 100.0]), seed=seeds,
)  # fmt: skip
@settings(deadline=None, max_examples=100)
def test_merged_owners_stay_whole(owners, clients, least, alpha, seed):
    owner = np.array(owners)
    if clients < 1 or least < 1 or len(np.unique(owner)) < clients * least:
        with pytest.raises(DataError, match="use fewer clients"):
            merged(owner, clients, alpha, seed, least)
        return
    parts = merged(owner, clients, alpha, seed, least)
    assert len(check(parts, len(owner), clients)) == len(owner)
    assert sum(len(np.unique(owner[part])) for part in parts) == len(np.unique(owner))
    assert min(len(np.unique(owner[part])) for part in parts) >= least
    assert same(parts, merged(owner, clients, alpha, seed, least))


def test_which_silos_take_part_depends_on_the_seed():
    owner = np.repeat(np.arange(50), 3)
    assert not same(natural(owner, 5, 0), natural(owner, 5, 1))


@given(size=st.integers(1, 100), number=st.integers(-1, 110), seed=seeds)
@settings(deadline=None, max_examples=40)
def test_a_subsample_has_its_size(size, number, seed):
    if not 1 <= number <= size:
        with pytest.raises(DataError, match="take must be between"):
            subsample(size, number, seed)
        return
    kept = subsample(size, number, seed)
    assert len(check([kept], size)) == number
    assert np.array_equal(kept, np.sort(kept))
