"""Algebra on named tensors.

A *tree* is a tensor, or a dict, tuple or NamedTuple of trees. Models, client states, server states and messages are
all trees, so counting bytes, checkpointing and sending over a wire are written once, here. Where a function speaks of
*rows*, every leaf has the client axis first.

Integer and boolean leaves (BatchNorm's step counter, for instance) take part in means by rounding, and never in
distances.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from coterie.processor import intel

Tree = Any
Params = dict[str, Tensor]
T = TypeVar("T")
LANE = 16_384  # numbers of a row that one core reads at a time


def map(fn: Callable[..., Any], tree: T, *rest: Any) -> T:
    """Apply `fn` to every leaf of `tree` together with the leaves at the same place in `rest`."""
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


def leaves(tree: Tree) -> list[Tensor]:
    found: list[Tensor] = []
    map(found.append, tree)
    return found


def pack(tree: Tree) -> Params:
    """Flatten to `{path: tensor}`; paths join dict keys, field names and tuple positions with '/'."""
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
    """The inverse of `pack`, given any tree of the same structure; names, shapes and types must agree.

    Leaves come to be where those of `like` are.
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
    """The structure of `like` with the values of `flat`, whatever their shapes."""
    values = iter([flat[path] for path in pack(like)])
    return map(lambda _: next(values), like)


def separate(flat: Params) -> Params:
    """Contiguous tensors on the CPU, no two of which share memory, as files want them."""
    own: Params = {}
    taken: set[int] = set()
    for path, leaf in flat.items():
        value = leaf.detach().cpu().contiguous()
        start = value.untyped_storage().data_ptr()
        own[path] = value.clone() if start in taken else value
        taken.add(start)
    return own


def add(a: T, b: T) -> T:
    return map(torch.add, a, b)


def sub(a: T, b: T) -> T:
    return map(torch.sub, a, b)


def scale(tree: T, factor: float | Tensor) -> T:
    return map(lambda leaf: _like(leaf * factor, leaf), tree)


def mix(a: T, b: T, weight: float | Tensor) -> T:
    """(1 - weight) a + weight b."""
    return map(lambda x, y: _like((1 - weight) * x + weight * y, x), a, b)


def where(condition: Tensor, a: T, b: T) -> T:
    """`a` where the scalar `condition` holds, else `b`."""
    return map(lambda x, y: torch.where(condition, x, y), a, b)


def sqdist(a: Tree, b: Tree) -> Tensor:
    """||a - b||^2 over all floating-point leaves."""
    return _total(lambda x, y: ((x - y) ** 2).sum(), a, b)


def dot(a: Tree, b: Tree) -> Tensor:
    """<a, b> over all floating-point leaves."""
    return _total(lambda x, y: (x * y).sum(), a, b)


def cosine(a: Tree, b: Tree) -> Tensor:
    """<a, b> / (||a|| ||b||), and 0 where one of them is 0."""
    lengths = dot(a, a).sqrt() * dot(b, b).sqrt()
    return torch.where(lengths > 0, dot(a, b) / lengths.clamp_min(torch.finfo(lengths.dtype).tiny), 0.0)


def clone(tree: T) -> T:
    return map(torch.clone, tree)


def stack(trees: Sequence[T]) -> T:
    """Rows from single trees."""
    return map(lambda *leaf: torch.stack(leaf), trees[0], *trees[1:])


def broadcast(tree: T, size: int) -> T:
    """The same tree in every one of `size` rows, without copying."""
    return map(lambda leaf: leaf.expand(size, *leaf.shape), tree)


def rows(tree: T, ids: Tensor | int | slice) -> T:
    """The rows `ids` (copied; a slice of them is not), or one row without its client axis."""
    if isinstance(ids, Tensor) and ids.ndim == 1 and ids.dtype == torch.int64:
        # Whole rows: up to six times as fast as by number.
        return map(lambda leaf: leaf.index_select(0, ids), tree)
    return map(lambda leaf: leaf[ids], tree)


def write_rows(into: Tensor, ids: Tensor, new: Tensor) -> None:
    """into[ids] = new, in place."""
    if into.is_cpu and into.dtype != torch.bfloat16 and new.is_cpu and into.dtype == new.dtype:
        # Whole rows, up to four times as fast as `index_copy_`.
        into.detach().numpy()[ids.numpy()] = new.detach().numpy()
    else:
        into.index_copy_(0, ids.to(into.device), new)


def repeated(leaf: Tensor) -> bool:
    """Whether all its rows are one, as `broadcast` makes them."""
    return leaf.ndim > 0 and len(leaf) > 1 and leaf.stride(0) == 0


def put(tree: T, ids: Tensor, new: T) -> T:
    """`tree` with its rows `ids` replaced by `new`; `new` itself, where these are all of them in their order."""
    everyone = not ids.is_meta and torch.equal(ids, _arange(len(ids), ids.device))

    def changed(leaf: Tensor, row: Tensor) -> Tensor:
        same = everyone and leaf.shape == row.shape and leaf.dtype == row.dtype
        return row if same else leaf.index_copy(0, ids, row)

    return map(changed, tree, new)


@functools.lru_cache(maxsize=8)
def _arange(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, device=device)


def mean(tree: T, weights: Tensor) -> T:
    """sum_k w_k tree_k / sum_k w_k over the rows of `tree`; `weights` is [rows], nonnegative, with a positive sum."""
    share = wide(weights) / wide(weights).sum()

    def average(leaf: Tensor) -> Tensor:
        flat = leaf.reshape(leaf.shape[0], -1)
        dtype = leaf.dtype if leaf.is_floating_point() else share.dtype
        return _like(_product(share.to(dtype), flat.to(dtype)).reshape(leaf.shape[1:]), leaf)

    return map(average, tree)


def wide(leaf: Tensor) -> Tensor:
    """In float64, or in float32 on Apple's GPUs, which have no float64."""
    return leaf.float() if leaf.device.type == "mps" else leaf.double()


def nbytes(tree: Tree) -> int:
    return sum(leaf.nbytes for leaf in leaves(tree))


def finite(tree: Tree) -> bool:
    return all(bool(torch.isfinite(leaf).all()) for leaf in leaves(tree))


def _product(share: Tensor, flat: Tensor) -> Tensor:
    """share @ flat, [rows] by [rows, numbers].

    Where MKL is not made for the processor, it reads many numbers at two thirds of the memory's speed; not so if they
    are cut into lanes, of which each is one core's work.
    """
    lanes = flat.shape[1] // LANE
    if not lanes or intel():
        return share @ flat
    cut = flat[:, : lanes * LANE].reshape(-1, lanes, LANE).transpose(0, 1)
    first = torch.bmm(share.expand(lanes, 1, -1), cut).flatten()
    rest = flat[:, lanes * LANE :]
    return torch.cat([first, share @ rest]) if rest.shape[1] else first


def _like(value: Tensor, leaf: Tensor) -> Tensor:
    return value if leaf.is_floating_point() else value.round().to(leaf.dtype)


def _total(term: Callable[[Tensor, Tensor], Tensor], a: Tree, b: Tree) -> Tensor:
    terms: list[Tensor] = []
    map(lambda x, y: terms.append(term(x, y)) if x.is_floating_point() else None, a, b)
    return torch.stack(terms).sum() if terms else torch.zeros(())
