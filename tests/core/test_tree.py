"""`coterie.core.tree`: every function against its definition, on random trees."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from coterie.core import tree

repeatable = settings(max_examples=40, deadline=None, derandomize=True)


class Pair(NamedTuple):
    left: Any
    right: Any


NAMES = st.text("abw._1", min_size=1, max_size=4)
SHAPES = st.lists(st.integers(1, 3), max_size=3).map(tuple)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.float32:
        return torch.randn(shape, generator=generator)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


def trees(rows: tuple[int, ...] = ()) -> st.SearchStrategy[Any]:
    """Nested trees whose leaves have the shape [*rows, ...]."""
    dtypes = st.sampled_from([torch.float32, torch.float32, torch.int64, torch.bool])
    leaf = st.builds(lambda shape, *rest: values((*rows, *shape), *rest), SHAPES, dtypes, st.integers(0, 10**6))
    return st.recursive(
        leaf,
        lambda child: st.one_of(
            st.dictionaries(NAMES, child, max_size=3),
            st.lists(child, max_size=3).map(tuple),
            st.builds(Pair, child, child),
        ),
        max_leaves=6,
    )


def like(structure: Any, seed: int) -> Any:
    """Another tree of the same structure."""
    seeds = iter(range(seed, seed + 1000))
    return tree.map(lambda leaf: values(tuple(leaf.shape), leaf.dtype, next(seeds)), structure)


def same(a: Any, b: Any) -> bool:
    """The same structure, types, and values to the bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b) or len(a) != len(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    return all(map(same, a, b))


def floats(*all_trees: Any) -> list[np.ndarray[Any, Any]]:
    """All floating-point values of each tree, as one float64 vector."""
    kept = [[leaf.double().flatten() for leaf in tree.leaves(t) if leaf.is_floating_point()] for t in all_trees]
    return [torch.cat([torch.zeros(0), *parts]).double().numpy() for parts in kept]


@repeatable
@given(trees(), st.integers(0, 10**6))
def test_unpack_inverts_pack(original: Any, seed: int) -> None:
    packed = tree.pack(original)
    assert len(packed) == len(tree.leaves(original))
    shuffled = dict(reversed(packed.items()))  # a file need not keep the order of names
    assert same(tree.unpack(shuffled, like(original, seed)), original)


def test_pack_names_a_leaf_by_its_path() -> None:
    packed = tree.pack({"model": {"0.weight": torch.ones(1)}, "state": (Pair(torch.ones(2), ()), torch.ones(3))})
    assert {name: len(leaf) for name, leaf in packed.items()} == {
        "model/0.weight": 1,
        "state/0/left": 2,
        "state/1": 3,
    }


def test_pack_loses_no_leaf_to_a_name_with_a_slash() -> None:
    ambiguous = {"a": {"b": torch.zeros(1)}, "a/b": torch.ones(1)}
    with pytest.raises(ValueError, match="a/b"):
        tree.pack(ambiguous)


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({"a": torch.zeros(2)}, r"missing \['b/0'\], unexpected \[\]"),
        ({"a": torch.zeros(2), "b/0": torch.zeros(3), "c": torch.zeros(1)}, r"missing \[\], unexpected \['c'\]"),
        ({"a": torch.zeros(2), "b/0": torch.zeros(4)}, r"'b/0': expected \(3,\) torch.float32, got \(4,\)"),
        ({"a": torch.zeros(2).long(), "b/0": torch.zeros(3)}, r"'a': .*torch.float32, got \(2,\) torch.int64"),
    ],
)
def test_unpack_names_what_does_not_fit(flat: tree.Params, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree.unpack(flat, {"a": torch.zeros(2), "b": (torch.zeros(3),)})


def test_map_names_what_does_not_fit() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match=r"\['b', 'c'\]"):
        tree.map(torch.add, {"a": one, "b": one}, {"a": one, "c": one})
    with pytest.raises(ValueError, match="2 and 3"):
        tree.map(torch.add, (one, one), (one, one, one))
    with pytest.raises(TypeError, match="not list"):
        tree.map(torch.neg, {"a": [one]})


def test_map_says_that_a_dict_is_no_tuple() -> None:
    with pytest.raises((TypeError, ValueError), match="dict"):
        tree.map(torch.add, {"a": torch.ones(1)}, (torch.ones(1),))


def test_map_pairs_leaves_by_name() -> None:
    a, b = {"x": torch.tensor(1.0), "y": torch.tensor(2.0)}, {"y": torch.tensor(20.0), "x": torch.tensor(10.0)}
    assert same(tree.add(a, b), {"x": torch.tensor(11.0), "y": torch.tensor(22.0)})


@repeatable
@given(trees((4,)), st.lists(st.floats(0.015625, 8, width=32), min_size=4, max_size=4))
def test_mean_is_the_weighted_mean(population: Any, weights: list[float]) -> None:
    result = tree.mean(population, torch.tensor(weights))
    for leaf, mean in zip(tree.leaves(population), tree.leaves(result), strict=True):
        expected = np.average(leaf.double().numpy(), axis=0, weights=weights)
        assert mean.dtype == leaf.dtype
        assert mean.shape == leaf.shape[1:]
        rounding = 1e-5 if leaf.is_floating_point() else 0.5 + 1e-4  # an integer is the nearest one
        np.testing.assert_allclose(mean.double().numpy(), expected, rtol=0, atol=rounding)


@repeatable
@given(trees((4,)), st.permutations(range(4)), st.sampled_from([1e-6, 0.3, 7.0, 1e6]))
def test_mean_ignores_order_and_scale_of_weights(population: Any, order: list[int], factor: float) -> None:
    weights = torch.tensor([0.1, 0.0, 2.7, 1.3])
    ids = torch.tensor(order)
    [mean, permuted, scaled] = floats(
        tree.mean(population, weights),
        tree.mean(tree.rows(population, ids), weights[ids]),
        tree.mean(population, factor * weights),
    )
    np.testing.assert_allclose(permuted, mean, rtol=0, atol=1e-5)
    np.testing.assert_allclose(scaled, mean, rtol=0, atol=1e-5)


def test_mean_makes_nothing_of_the_clients_size() -> None:
    """It reads each model where it lies: no operation on the way gives more numbers than one model has."""
    made: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            mine = {value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)}
            if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in mine:
                made.append(out.numel())
            return out

    population = {"a": torch.ones(50, 8, 100), "b": torch.ones(50, 100)}
    with Watch():
        tree.mean(population, torch.rand(50) + 1)
    assert max(made) == 800


def test_mean_of_equal_counters_is_that_counter() -> None:
    counters = torch.full((3,), 10**9)  # three float32 thirds are 1 + 3e-8
    assert tree.mean(counters, torch.ones(3)) == 10**9


def test_mean_keeps_double_precision() -> None:
    rows = values((3, 5), torch.float32, 0).double()
    np.testing.assert_allclose(tree.mean(rows, torch.ones(3)).numpy(), rows.numpy().mean(0), rtol=0, atol=1e-14)


@repeatable
@given(trees(), st.integers(0, 10**6), st.floats(0, 1))
def test_mix(a: Any, seed: int, weight: float) -> None:
    b = like(a, seed)
    for x, y, mixed in zip(*map(tree.leaves, (a, b, tree.mix(a, b, weight))), strict=True):
        expected = (1 - weight) * x.double() + weight * y.double()
        assert mixed.dtype == x.dtype
        tolerance = 1e-5 if x.is_floating_point() else 0.5 + 1e-4
        assert (mixed.double() - expected).abs().max() <= tolerance
    assert same(tree.mix(a, b, 0.0), a)
    assert same(tree.mix(a, b, 1.0), b)


@repeatable
@given(trees((5,)), st.integers(0, 10**6), st.permutations(range(5)), st.integers(1, 5))
def test_rows_put_and_stack_are_inverse(population: Any, seed: int, order: list[int], size: int) -> None:
    assert same(tree.stack([tree.rows(population, i) for i in range(5)]), population)
    ids, others = torch.tensor(order[:size]), torch.tensor(order[size:], dtype=torch.int64)
    new = tree.rows(like(population, seed), ids)
    after = tree.put(population, ids, new)
    assert same(tree.rows(after, ids), new)
    assert same(tree.rows(after, others), tree.rows(population, others))


def test_broadcast_repeats_without_copying() -> None:
    one = {"w": torch.arange(3.0)}
    many = tree.broadcast(one, 4)
    assert same(many, tree.stack([one] * 4))
    assert many["w"].data_ptr() == one["w"].data_ptr()
    assert tree.nbytes(many) == 4 * 3 * 4


@repeatable
@given(trees(), st.integers(0, 10**6))
def test_distances_are_those_of_one_long_vector(a: Any, seed: int) -> None:
    b = like(a, seed)
    x, y = floats(a, b)
    np.testing.assert_allclose(tree.dot(a, b).item(), x @ y, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(tree.sqdist(a, b).item(), ((x - y) ** 2).sum(), rtol=1e-4, atol=1e-4)
    lengths = np.linalg.norm(x) * np.linalg.norm(y)
    np.testing.assert_allclose(tree.cosine(a, b).item(), x @ y / lengths if lengths else 0.0, rtol=0, atol=1e-4)


def test_distances_pair_leaves_by_name() -> None:
    a = {"x": torch.tensor([3.0]), "y": torch.tensor([4.0])}
    b = {"y": torch.tensor([4.0]), "x": torch.tensor([3.0])}
    assert tree.sqdist(a, b) == 0
    assert tree.dot(a, b) == 25
    assert tree.cosine(a, b) == 1


@pytest.mark.parametrize("size", [0.0, 1e-18, 1e-12, 1.0, 1e12, 1e18])
def test_cosine_does_not_depend_on_length(size: float) -> None:
    a = {"w": torch.tensor([size, 0.0])}
    b = {"w": torch.tensor([size, size])}
    expected = math.sqrt(0.5) if size else 0.0
    assert tree.cosine(a, b).item() == pytest.approx(expected, abs=1e-6)


def test_where_and_finite() -> None:
    a, b = {"w": torch.ones(2)}, {"w": torch.full((2,), math.inf)}
    assert same(tree.where(torch.tensor(True), a, b), a)
    assert same(tree.where(torch.tensor(False), a, b), b)
    assert tree.finite(a)
    assert not tree.finite(b)
    assert not tree.finite({"n": torch.tensor(1), "w": torch.tensor([0.0, math.nan])})


@repeatable
@given(trees((3,)), st.integers(0, 10**6))
def test_inputs_are_not_modified(a: Any, seed: int) -> None:
    b, ids, weights = like(a, seed), torch.tensor([2, 0]), torch.tensor([1.0, 2.0, 3.0])
    before = tree.clone((a, b, ids, weights))
    tree.unpack(tree.pack(a), b)
    tree.mix(a, b, 0.3)
    tree.mean(a, weights)
    tree.put(a, ids, tree.rows(b, ids))
    tree.stack([a, b])
    tree.scale(a, 2.0)
    tree.add(a, b)
    tree.sqdist(a, b), tree.cosine(a, b)
    assert same((a, b, ids, weights), before)


@pytest.mark.parametrize("numbers", [10, 40_000])
def test_mean_of_rows_is_the_weighted_sum(numbers):
    draw = torch.Generator().manual_seed(0)
    population, weights = torch.randn(7, numbers, 1, generator=draw), torch.rand(7, generator=draw)
    expected = (weights.double() / weights.double().sum()) @ population.double().flatten(1)
    torch.testing.assert_close(tree.mean(population, weights), expected.float()[:, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
def test_rows_are_taken_and_written(dtype, shape):
    leaf = torch.arange(6 * torch.Size(shape).numel()).reshape(6, *shape).to(dtype)
    ids, new = torch.tensor([4, 0, 5]), torch.ones(3, *shape, dtype=dtype)
    assert torch.equal(tree.rows(leaf, ids), leaf[ids])
    expected = leaf.clone()
    expected[ids] = new
    tree.write_rows(leaf, ids, new)
    assert torch.equal(leaf, expected)


def test_the_mean_of_long_rows_is_summed_a_few_at_a_time(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    weights = torch.rand(11, generator=draw)
    for dtype in (torch.float32, torch.float64, torch.int64):
        rows = (100 * torch.randn(11, 3, 7, generator=draw)).to(dtype)
        expected = tree.mean(rows, weights)
        monkeypatch.setattr(tree, "LONG_ROW", 1)
        torch.testing.assert_close(tree.mean(rows, weights), expected)
        monkeypatch.undo()
