"""Algebra on named tensors.

A *tree* is a tensor, or a dict, tuple or NamedTuple of trees. Models, client states, server states and messages are
all trees, so counting bytes, checkpointing and sending over a wire are written once, here. Where a docstring speaks of
*rows*, every leaf has the client axis first: its shape is [rows, ...].

All functions are pure unless they say otherwise. Trees that are combined must have the same structure. Means of integer
and boolean leaves (BatchNorm's step counter, for instance) are rounded; distances ignore such leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Tree = Any
Params = dict[str, Tensor]
T = TypeVar("T")
LONG_ROW = 2**17  # numbers; many rows of so many are read a few at a time
ROWS_AT_ONCE = 4


def map(fn: Callable[..., Any], tree: T, *rest: Any) -> T:
    """Apply `fn` to every leaf of `tree` together with the leaves at the same place in `rest`.

    Returns:
        A tree of the structure of `tree` that holds the results.

    Raises:
        TypeError: if the trees have different kinds of nodes, or hold something that is no tree.
        ValueError: if dicts have different keys or tuples different lengths; the message names them.
    """
    if isinstance(tree, Tensor):
        return cast(T, fn(tree, *rest))
    if isinstance(tree, dict):
        for other in rest:
            if not isinstance(other, dict):
                raise TypeError(f"trees have a dict and a {type(other).__name__} at the same place")
            if tree.keys() != other.keys():
                raise ValueError(f"trees have different names: {sorted(tree.keys() ^ other.keys())}")
        return cast(T, {name: map(fn, child, *(other[name] for other in rest)) for name, child in tree.items()})
    if isinstance(tree, tuple):
        for other in rest:
            if not isinstance(other, tuple):
                raise TypeError(f"trees have a tuple and a {type(other).__name__} at the same place")
            if len(tree) != len(other):
                raise ValueError(f"trees have tuples of different lengths: {len(tree)} and {len(other)}")
        children = [map(fn, *group) for group in zip(tree, *rest, strict=True)]
        return cast(T, type(tree)(*children) if hasattr(tree, "_fields") else tuple(children))
    raise TypeError(f"a tree holds tensors, dicts and tuples, not {type(tree).__name__}")


def without(tree: T, names: Collection[str]) -> T:
    """Return the tree without the children of these names, in all of its dicts."""
    if isinstance(tree, dict):
        return cast(T, {name: without(child, names) for name, child in tree.items() if name not in names})
    if isinstance(tree, tuple):
        children = [without(child, names) for child in tree]
        return cast(T, type(tree)(*children) if hasattr(tree, "_fields") else tuple(children))
    return tree


def filled(tree: Tree, full: T) -> T:
    """Invert `without`: return a tree of the structure of `full`, with the leaves of `tree` where it has them."""
    if isinstance(full, dict):
        return cast(T, {name: filled(tree[name], each) if name in tree else each for name, each in full.items()})
    if isinstance(full, tuple):
        children = [filled(*pair) for pair in zip(tree, full, strict=True)]
        return cast(T, type(full)(*children) if hasattr(full, "_fields") else tuple(children))
    return cast(T, tree)


def leaves(tree: Tree) -> list[Tensor]:
    """Return all tensors of the tree, in the order of its dicts and tuples."""
    found: list[Tensor] = []
    map(found.append, tree)
    return found


def pack(tree: Tree) -> Params:
    """Flatten a tree to `{path: tensor}`. A path joins dict keys, field names and tuple positions with '/'.

    Raises:
        ValueError: if two leaves would have the same path, because a key contains '/'.
    """
    flat: Params = {}

    def walk(node: Tree, path: tuple[str, ...]) -> None:
        if isinstance(node, Tensor):
            if "/".join(path) in flat:
                raise ValueError(f"two leaves would have the path '{'/'.join(path)}'")
            flat["/".join(path)] = node
            return
        if isinstance(node, dict):
            items: Iterable[tuple[str, Tree]] = node.items()
        else:
            items = zip(getattr(node, "_fields", [str(i) for i in range(len(node))]), node, strict=True)
        for name, child in items:
            walk(child, (*path, name))

    walk(tree, ())
    return flat


def unpack(flat: Params, like: T) -> T:
    """Invert `pack`: give the tensors of `flat` the structure of `like` and move them to the devices of its leaves.

    Raises:
        ValueError: if paths, shapes or types differ from those of `like`; the message names the difference.
    """
    expected = pack(like)
    if flat.keys() != expected.keys():
        missing, extra = sorted(expected.keys() - flat.keys()), sorted(flat.keys() - expected.keys())
        raise ValueError(f"packed tree does not fit: missing {missing}, unexpected {extra}")
    for path, leaf in expected.items():
        if flat[path].shape != leaf.shape or flat[path].dtype != leaf.dtype:
            raise ValueError(
                f"packed tree does not fit at '{path}': expected {tuple(leaf.shape)} {leaf.dtype}, "
                f"got {tuple(flat[path].shape)} {flat[path].dtype}"
            )
    return rebuild({path: value.to(expected[path].device) for path, value in flat.items()}, like)


def rebuild(flat: Params, like: T) -> T:
    """Give the tensors of `flat` (as `pack` returns them) the structure of `like`; their shapes may differ from it."""
    values = iter([flat[path] for path in pack(like)])
    return map(lambda _: next(values), like)


def separate(flat: Params) -> Params:
    """Return contiguous CPU tensors of which no two share memory, as safetensors files require."""
    own: Params = {}
    taken: set[int] = set()
    for path, leaf in flat.items():
        value = leaf.detach().cpu().contiguous()
        start = value.untyped_storage().data_ptr()
        own[path] = value.clone() if start in taken else value
        taken.add(start)
    return own


def add(a: T, b: T) -> T:
    """Return a + b."""
    return map(torch.add, a, b)


def sub(a: T, b: T) -> T:
    """Return a - b."""
    return map(torch.sub, a, b)


def scale(tree: T, factor: float | Tensor) -> T:
    """Return factor * tree; `factor` is a number or a tensor that broadcasts with every leaf."""
    return map(lambda leaf: _like(leaf * factor, leaf), tree)


def mix(a: T, b: T, weight: float | Tensor) -> T:
    """Return (1 - weight) a + weight b; `weight` is a number or a tensor that broadcasts with every leaf."""
    return map(lambda x, y: _like((1 - weight) * x + weight * y, x), a, b)


def where(condition: Tensor, a: T, b: T) -> T:
    """Return `a` if the boolean scalar tensor `condition` is true, else `b`; it works under `vmap`, unlike `if`."""
    return map(lambda x, y: torch.where(condition, x, y), a, b)


def sqdist(a: Tree, b: Tree) -> Tensor:
    """Return ||a - b||^2 over all floating-point leaves, a scalar tensor."""
    return _total(lambda x, y: ((x - y) ** 2).sum(), a, b)


def dot(a: Tree, b: Tree) -> Tensor:
    """Return the inner product <a, b> over all floating-point leaves, a scalar tensor."""
    return _total(lambda x, y: (x * y).sum(), a, b)


def cosine(a: Tree, b: Tree) -> Tensor:
    """Return <a, b> / (||a|| ||b||), a scalar tensor; it is 0 if one of them is 0."""
    lengths = dot(a, a).sqrt() * dot(b, b).sqrt()
    return torch.where(lengths > 0, dot(a, b) / lengths.clamp_min(torch.finfo(lengths.dtype).tiny), 0.0)


def clone(tree: T) -> T:
    """Return a copy that shares no memory with `tree`."""
    return map(torch.clone, tree)


def stack(trees: Sequence[T]) -> T:
    """Stack single trees into rows: leaves [...] become [len(trees), ...]."""
    return map(lambda *leaf: torch.stack(leaf), trees[0], *trees[1:])


def broadcast(tree: T, size: int) -> T:
    """Return `size` rows that are all `tree`: leaves [size, ...], which share memory with those of `tree`."""
    return map(lambda leaf: leaf.expand(size, *leaf.shape), tree)


def rows(tree: T, ids: Tensor | int | slice) -> T:
    """Select rows of a tree whose leaves are [rows, ...].

    Args:
        tree: the tree to select from.
        ids: an int64 tensor, which copies these rows and puts its shape in place of the client axis; a slice, which
            returns views; or one number, which returns that row without its client axis.
    """
    if isinstance(ids, Tensor) and ids.ndim == 1 and ids.dtype == torch.int64:
        # Whole rows: up to six times as fast as by number.
        return map(lambda leaf: leaf.index_select(0, ids), tree)
    return map(lambda leaf: leaf[ids], tree)


def write_rows(into: Tensor, ids: Tensor, new: Tensor) -> None:
    """Overwrite the rows `ids` [n] of the tensor `into` by `new` [n, ...], in place."""
    if into.is_cpu and into.dtype != torch.bfloat16 and new.is_cpu and into.dtype == new.dtype:
        # Whole rows, up to four times as fast as `index_copy_`.
        into.detach().numpy()[ids.numpy()] = new.detach().numpy()
    else:
        into.index_copy_(0, ids.to(into.device), new)


def is_broadcast(leaf: Tensor) -> bool:
    """Tell whether all rows of `leaf` are the same memory, as `broadcast` makes them."""
    return leaf.ndim > 0 and len(leaf) > 1 and leaf.stride(0) == 0


def put(tree: T, ids: Tensor, new: T) -> T:
    """Return `tree` with its rows `ids` replaced by `new`.

    Args:
        tree: leaves are [rows, ...]; it is not modified.
        ids: [n] int64, without repetition.
        new: leaves are [n, ...]. If `ids` are all rows in their order, the result is `new` itself, not a copy.
    """
    everyone = not ids.is_meta and torch.equal(ids, _arange(len(ids), ids.device))

    def changed(leaf: Tensor, row: Tensor) -> Tensor:
        same = everyone and leaf.shape == row.shape and leaf.dtype == row.dtype
        return row if same else leaf.index_copy(0, ids, row)

    return map(changed, tree, new)


@functools.lru_cache(maxsize=8)
def _arange(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, device=device)


def mean(tree: T, weights: Tensor) -> T:
    """Return the weighted mean over rows, sum_k w_k tree_k / sum_k w_k.

    Args:
        tree: leaves are [rows, ...].
        weights: [rows], nonnegative and with a positive sum; they need not add up to 1.

    Returns:
        A tree with leaves [...], of the types of those of `tree`.
    """
    share = widest_float(weights) / widest_float(weights).sum()

    def average(leaf: Tensor) -> Tensor:
        flat = leaf.reshape(leaf.shape[0], -1)
        dtype = leaf.dtype if leaf.is_floating_point() else share.dtype
        return _like(_weighted_sum(share.to(dtype), flat.to(dtype)).reshape(leaf.shape[1:]), leaf)

    return map(average, tree)


def _weighted_sum(weights: Tensor, flat: Tensor) -> Tensor:
    """Return sum_k w_k flat_k; a few long rows at a time, since a processor follows few places in memory at once."""
    few = ROWS_AT_ONCE if flat.shape[1] >= LONG_ROW else max(len(flat), 1)
    parts = zip(torch.split(weights, few), torch.split(flat, few), strict=True)
    first, rows = next(parts)
    total: Tensor = first @ rows
    for more, rows in parts:
        total.addmv_(rows.T, more)
    return total


def widest_float(leaf: Tensor) -> Tensor:
    """Convert to float64, or to float32 on Apple's GPUs, which have no float64."""
    return leaf.float() if leaf.device.type == "mps" else leaf.double()


def nbytes(tree: Tree) -> int:
    """Return the number of bytes of all leaves together."""
    return sum(leaf.nbytes for leaf in leaves(tree))


def finite(tree: Tree) -> bool:
    """Tell whether no leaf holds an infinity or a NaN."""
    return all(bool(torch.isfinite(leaf).all()) for leaf in leaves(tree))


def _like(value: Tensor, leaf: Tensor) -> Tensor:
    """Round `value` to the type of `leaf` if that is an integer or boolean type."""
    return value if leaf.is_floating_point() else value.round().to(leaf.dtype)


def _total(term: Callable[[Tensor, Tensor], Tensor], a: Tree, b: Tree) -> Tensor:
    """Add up `term` over the floating-point leaves of both trees."""
    terms: list[Tensor] = []
    map(lambda x, y: terms.append(term(x, y)) if x.is_floating_point() else None, a, b)
    return torch.stack(terms).sum() if terms else torch.zeros(())
