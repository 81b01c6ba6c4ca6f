import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.errors import ConfigError, DataError
from coterie.data import Federation, Split, from_clients, load
from coterie.data.federation import replace_unchecked, split_again, split_client
from coterie.data.readers.synthetic import synthetic


@given(
    size=st.integers(3, 300), classes=st.integers(1, 5), seed=st.integers(0, 10),
    validation=st.floats(0.01, 0.45), test=st.floats(0.01, 0.45),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_splits_are_a_partition_with_at_least_one_each(size, classes, validation, test, seed):
    labels = np.random.default_rng(seed).integers(classes, size=size)
    split = split_client("a", size, labels, validation, test, seed)
    together = np.concatenate([split.train, split.validation, split.test])
    assert sorted(together) == list(range(size))
    assert min(map(len, (split.train, split.validation, split.test))) >= 1


@given(
    size=st.integers(0, 60), classes=st.integers(1, 5), seed=st.integers(0, 10),
    validation=st.integers(1, 20) | st.floats(0.01, 0.45), test=st.integers(1, 20),
)  # fmt: skip
@settings(deadline=None, max_examples=80)
def test_parts_can_be_numbers_of_examples(size, classes, validation, test, seed):
    labels = np.random.default_rng(seed).integers(classes, size=size)
    few = max(round(size * validation), 1) if validation < 1 else validation
    if size < 3 or test + few >= size:
        with pytest.raises(DataError, match=r"client 'a' has \d+ examples?"):
            split_client("a", size, labels, validation, test, seed)
        return
    split = split_client("a", size, labels, validation, test, seed)
    assert len(split.test) == test
    assert len(split.validation) == few
    assert len(split.train) >= 1
    assert sorted(np.concatenate([split.train, split.validation, split.test])) == list(range(size))


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6), seed=st.integers(0, 20))
@settings(deadline=None, max_examples=80)
def test_every_part_has_every_class_in_proportion(sizes, seed):
    """Of n of N examples in C classes, a cut after m leaves n m / N before it, to within 1 + n C / N; a part has two.

    For a class is spread evenly, so it has n t, to within 1, before the place t; and m is N t, to within C."""
    sizes = np.array(sizes)
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    if len(labels) < 10:
        return
    split = split_client("a", len(labels), labels, 0.2, 0.3, seed)
    for part in (split.train, split.validation, split.test):
        have = np.bincount(labels[part], minlength=len(sizes))
        room = 2 + 2 * sizes * (sizes > 0).sum() / len(labels)
        assert (np.abs(have - sizes * len(part) / len(labels)) <= room).all()


def test_splits_are_stratified():
    labels = np.array([0] * 850 + [1] * 150)
    split = split_client("a", 1000, labels, 0.1, 0.3, 0)
    for part, size in ((split.train, 600), (split.validation, 100), (split.test, 300)):
        assert len(part) == size
        assert abs(labels[part].mean() - 0.15) < 0.025


def test_splits_depend_on_seed_and_name_only():
    labels = np.zeros(50, int)
    base = split_client("a", 50, labels, 0.1, 0.3, 0)
    assert (base.test == split_client("a", 50, labels, 0.1, 0.3, 0).test).all()
    assert not np.array_equal(base.test, split_client("b", 50, labels, 0.1, 0.3, 0).test)
    assert not np.array_equal(base.test, split_client("a", 50, labels, 0.1, 0.3, 1).test)


@given(size=st.integers(3, 200), number=st.integers(1, 60), classes=st.integers(1, 3), seed=st.integers(0, 10),
       validation=st.floats(0.01, 0.45), test=st.floats(0.01, 0.45))  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_a_group_is_never_on_two_sides(size, number, classes, seed, validation, test):
    draw = np.random.default_rng(seed)
    groups, labels = draw.integers(number, size=size), draw.integers(classes, size=size)
    if len(np.unique(groups)) < 3:
        with pytest.raises(DataError, match=r"client 'a' has \d groups?: at least 3 are needed"):
            split_client("a", size, labels, validation, test, seed, groups=groups)
        return
    split = split_client("a", size, labels, validation, test, seed, groups=groups)
    parts = [split.train, split.validation, split.test]
    assert sorted(np.concatenate(parts)) == list(range(size))
    assert min(map(len, parts)) >= 1
    sides = [set(groups[part]) for part in parts]
    assert not (sides[0] & sides[1])
    assert not (sides[0] & sides[2])
    assert not (sides[1] & sides[2])


def test_grouped_splits_are_stratified_and_of_the_sizes_asked_for():
    patient = np.repeat(np.arange(300), 3)
    labels = (patient % 4 == 0).astype(int)
    split = split_client("a", 900, labels, 0.1, 0.3, 0, groups=patient)
    for part, share in ((split.train, 0.6), (split.validation, 0.1), (split.test, 0.3)):
        assert abs(len(part) / 900 - share) < 0.005
        assert abs(labels[part].mean() - 0.25) < 0.03
    one_each = split_client("a", 900, labels, 0.1, 0.3, 0, groups=np.arange(900))
    assert abs(len(one_each.test) - 270) <= 1


def test_synthetic_label_skew_is_the_papers():
    data = load("synthetic-label-skew", seed=0)
    assert len(data.names) == 10
    assert data.x.shape == (20_000, 30)
    shares = [1 - float(data.y[torch.from_numpy(np.concatenate([s.train, s.validation, s.test]))].double().mean())
              for s in data.clients.values()]  # fmt: skip
    np.testing.assert_allclose(shares, [0.5] * 5 + [0.85] * 5)
    for split in data.clients.values():
        assert (len(split.train), len(split.validation), len(split.test)) == (1200, 200, 600)
        own = data.x[torch.from_numpy(split.train)]
        torch.testing.assert_close(own.mean(0), torch.zeros(30), atol=1e-5, rtol=0)
        torch.testing.assert_close(own.std(0, correction=0), torch.ones(30), atol=1e-4, rtol=0)


def test_synthetic_classes_have_the_papers_moments():
    """Without rotation and affine map, the signal of class 0 has variance 2 and that of class 1 radius 8."""
    from coterie.data.readers.synthetic import _points

    x, y = _points(np.random.default_rng(0), 20_000, 40_000, np.eye(30))
    zero, one = x[y == 0], x[y == 1]
    np.testing.assert_allclose(zero[:, :4].var(0), 2, rtol=0.05)
    np.testing.assert_allclose(x[:, 4:].var(0), 9, rtol=0.05)
    radius = np.linalg.norm(one[:, :4], axis=1)
    np.testing.assert_allclose([radius.mean(), radius.var()], [8, 2], rtol=0.05)
    np.testing.assert_allclose(one[:, :4].mean(0), 0, atol=0.1)


def test_synthetic_quantity_skew_sizes():
    data = load("synthetic-quantity-skew", seed=1)
    sizes = [sum(map(len, (s.train, s.validation, s.test))) for s in data.clients.values()]
    assert sizes == [2000] * 5 + [500] * 5


def test_synthetic_data_of_a_client_does_not_depend_on_the_others():
    few, many = (
        synthetic("a", 0, sizes=(50, 60), share_of_0=(0.5, 0.5)),
        synthetic("a", 0, sizes=(50, 60, 70), share_of_0=(0.5,) * 3),
    )
    assert torch.equal(few.x, many.x[:110])


def test_digits_has_every_image_once():
    data = load("digits", seed=0)
    assert data.x.shape == (1797, 1, 8, 8)
    together = np.concatenate([np.concatenate([s.train, s.validation, s.test]) for s in data.clients.values()])
    assert sorted(together) == list(range(1797))


def pair(size=20, **changes):
    x = torch.randn(size, 3, generator=torch.Generator().manual_seed(0))
    return changes.get("x", x), changes.get("y", torch.arange(size) % 2)


def test_bad_input_is_named():
    good = pair()
    nan = good[0].clone()
    nan[7, 1] = torch.nan
    with pytest.raises(DataError, match=r"client 'b'.*NaN.*row 7"):
        from_clients({"a": good, "b": (nan, good[1])})
    with pytest.raises(DataError, match="client 'b' has 0 examples"):
        from_clients({"a": good, "b": (torch.zeros(0, 3), torch.zeros(0).long())})
    with pytest.raises(DataError, match="client 'b' has 1 example:"):
        from_clients({"a": good, "b": (torch.zeros(1, 3), torch.zeros(1).long())})
    with pytest.raises(DataError, match="client 'b': 5 inputs but 4 targets"):
        from_clients({"a": good, "b": (torch.zeros(5, 3), torch.zeros(4).long())})
    with pytest.raises(DataError, match=r"client 'b': inputs of shape \(4,\)"):
        from_clients({"a": good, "b": (torch.zeros(5, 4), torch.zeros(5).long())})
    with pytest.raises(DataError, match=r"client 'a' has a label outside 0\.\.1"):
        from_clients({"a": (good[0], good[1] * 2)}, num_classes=2)
    with pytest.raises(DataError, match="at least one client"):
        from_clients([])
    with pytest.raises(DataError, match="leave it out"):
        Federation("a", *good, {"a": Split(np.arange(3), np.arange(0), np.arange(3))}, 2)
    with pytest.raises(ConfigError, match="no data set 'nope'"):
        load("nope", 0)


def test_a_class_absent_from_a_client_is_fine():
    x, _ = pair()
    data = from_clients({"a": (x, torch.arange(20) % 3), "b": (x, torch.zeros(20).long())})
    assert data.num_classes == 3


def test_float_targets_mean_regression():
    x, _ = pair()
    data = from_clients([(x, x[:, 0])])
    assert data.kind == "regression"
    assert data.y.dtype == torch.float32


@pytest.mark.parametrize("regression", [False, True])
def test_splitting_again_is_what_another_seed_gives(regression):
    draw = torch.Generator().manual_seed(0)
    targets = [torch.arange(size) % 3 for size in (9, 30, 14)]
    data = [(torch.randn(len(y), 2, generator=draw), y.float() if regression else y) for y in targets]
    shares = {"validation": 0.2, "test": 3}
    first, other = (from_clients(data, seed=seed, **shares) for seed in (0, 1))
    found = split_again(first, seed=1, **shares)
    assert found.x is first.x
    assert found.names == other.names
    for name in found.names:
        for part in ("train", "validation", "test"):
            np.testing.assert_array_equal(found.clients[name][part], other.clients[name][part])


def test_what_is_known_of_a_federation_is_found_anew_for_another_one():
    data = from_clients(
        {name: (torch.zeros(size, 2), torch.zeros(size)) for name, size in (("a", 9), ("b", 30), ("c", 9))}
    )
    assert data.sizes == [len(split.train) for split in data.clients.values()]
    assert data.rank == [1, 0, 2]  # the largest first, then by name
    assert data.largest == data.sizes[1]
    assert [own.tolist() for own in data.train] == [split.train.tolist() for split in data.clients.values()]
    less = replace_unchecked(data, clients={"c": data.clients["c"], "a": data.clients["a"]})
    assert (less.sizes, less.rank, less.largest) == ([data.sizes[2], data.sizes[0]], [1, 0], data.sizes[0])
    assert less.train[0].tolist() == data.train[2].tolist()
    twin = copy.deepcopy(data)
    assert (twin.sizes, twin.rank) == (data.sizes, data.rank)
    assert not any(np.shares_memory(a, b) for a, b in zip(twin.train, data.train, strict=True))
