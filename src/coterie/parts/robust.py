"""Robust aggregation: one hostile client must not move the clients' mean wherever it wants.

A server that averages, w <- sum_i p_i w_i, can be moved anywhere by one client. Here the models of a round are made
robust before the method combines them. Of the clients' models w_1, ..., w_n, as vectors:

    median             the median of each coordinate                                   (`median`; Yin et al. 2018)
    trimmed:b          the mean of each coordinate without its floor(b n) smallest     (`trimmed`; Yin et al. 2018)
                       and as many largest values
    krum:f             the w_i whose n - f - 2 nearest others are nearest, by the      (`krum`; Blanchard et al. 2017)
                       sum of squared distances
    multi-krum:f       the mean of the n - f models with the smallest such sums             (`multi_krum`; the same)
    geometric-median   argmin_z sum_i ||w_i - z||, by Weiszfeld's iteration            (`geometric_median`;
                                                                                       Pillutla et al. 2022)
    clip:r             w_i <- m + min(1, r / ||w_i - m||) (w_i - m), where m is the    (`clip`)
                       median; clip:auto takes the median of ||w_i - m|| for r
    nnm:f+RULE         w_i <- the mean of its n - f nearest, itself included; then     (`nearest_mixed`;
                       any of these rules                                              Allouah et al. 2023)

All but `clip` give every client of the round the same robust model, so that the method's mean is this model, whatever
its weights are: weights, which a client may lie about, no longer matter, and neither do numbers of examples. Integer
leaves are rounded.

This is a wrapper around `aggregate` (`robust`), not a method. It needs a method that uses the models in its messages
by nothing but their weighted mean; `averaged_fields` says which fields of a message these are.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import ConfigError
from coterie.core.method import CountedParams, Method, TrainedAndBuffers
from coterie.core.tree import Tree

AnyMethod = Method[Any, Any, Any, Any]
Rule = Callable[[Tensor], Tensor]  # [clients, numbers] -> the same shape
WEISZFELD_STEPS = 50
NEAR_ZERO = 1e-12  # of the mean distance: a point so near to another counts as so near
CHOICES = "median, trimmed:0.2, krum:1, multi-krum:1, geometric-median, clip:auto, clip:10 or nnm:1+median"


def median(w: Tensor) -> Tensor:
    """Return the median of each coordinate, for every client; of an even number, the mean of the two in the middle."""
    return w.quantile(0.5, 0).expand_as(w) if w.numel() <= 2**24 else _trim(w, (len(w) - 1) // 2)


def trimmed(w: Tensor, share: float) -> Tensor:
    """Return the mean of each coordinate without the smallest and largest floor(share n) values, for every client."""
    return _trim(w, int(share * len(w)))


def krum(w: Tensor, hostile: int) -> Tensor:
    """Return the model that lies closest to its n - hostile - 2 nearest others, for every client.

    Raises:
        ConfigError: there are fewer than 2 hostile + 3 clients, and so no guarantee.
    """
    return w[krum_scores(w, hostile, "krum").argmin()].expand_as(w)


def multi_krum(w: Tensor, hostile: int) -> Tensor:
    """Return the mean of all models but the `hostile` ones that lie farthest from their nearest others, for everybody.

    Raises:
        ConfigError: there are fewer than 2 hostile + 3 clients, and so no guarantee.
    """
    score = krum_scores(w, hostile, "multi-krum")
    return w[score.argsort(stable=True)[: len(w) - hostile]].mean(0).expand_as(w)


def krum_scores(w: Tensor, hostile: int, name: str) -> Tensor:
    """Return each model's sum of squared distances to its n - hostile - 2 nearest others: [clients].

    Raises:
        ConfigError: there are fewer than 2 hostile + 3 clients; it calls the rule by this name.
    """
    n = len(w)
    if n < 2 * hostile + 3:
        raise ConfigError(
            [f"robust = '{name}:{hostile}' needs {2 * hostile + 3} clients in a round, and {n} were heard: use median"]
        )
    squares = _distances(w) ** 2
    return squares.sort(1).values[:, 1 : n - hostile - 1].sum(1)  # the first is the client itself


def geometric_median(w: Tensor) -> Tensor:
    """Return the point with the least sum of distances to all models, for every client."""
    z = w.mean(0)
    for _ in range(WEISZFELD_STEPS):
        distance = (w - z).norm(dim=1)
        pull = 1 / distance.clamp_min((NEAR_ZERO * distance.mean()).clamp_min(torch.finfo(w.dtype).tiny))
        z = (pull / pull.sum()) @ w
    return z.expand_as(w)


def clip(w: Tensor, radius: float | None) -> Tensor:
    """Return every model no further from the median than `radius`; None: than the median of these distances."""
    centre = median(w)
    away = w - centre
    distance = away.norm(dim=1, keepdim=True)
    most = distance.quantile(0.5) if radius is None else distance.new_tensor(radius)
    shorter: Tensor = (most / distance.clamp_min(torch.finfo(w.dtype).tiny)).clamp_max(1)
    return centre + away * shorter


def nearest_mixed(w: Tensor, hostile: int) -> Tensor:
    """Return for each model the mean of its n - hostile nearest, itself included.

    Honest models come close to their mean, so that a rule after this finds it even where clients differ. Hostile ones
    that are far from all become means of mostly honest ones.

    Raises:
        ConfigError: half of the clients or more would be hostile.
    """
    n = len(w)
    if 2 * hostile >= n:
        raise ConfigError(
            [f"robust = 'nnm:{hostile}' needs {2 * hostile + 1} clients in a round, and {n} were heard: use median"]
        )
    near = _distances(w).argsort(dim=1, stable=True)[:, : n - hostile]
    return torch.stack([w[row].mean(0) for row in near])


def _distances(w: Tensor) -> Tensor:
    return torch.cdist(w, w, compute_mode="donot_use_mm_for_euclid_dist")


def _trim(w: Tensor, number: int) -> Tensor:
    ordered = w.sort(0).values
    return ordered[number : len(w) - number].mean(0).expand_as(w)


def parse(text: str) -> Rule:
    """Return the rule that `text` names.

    Raises:
        ValueError: it names none; the message says what there is.
    """
    first, plus, then = text.partition("+")
    try:
        if not plus and (rule := _rule(*first.partition(":"))) is not None:
            return rule
        if plus and first.startswith("nnm:") and int(first[4:]) >= 0 and not then.startswith("nnm:"):
            hostile, after = int(first[4:]), parse(then)
            return lambda w: after(nearest_mixed(w, hostile))
    except ValueError:
        pass
    raise ValueError(f"choose {CHOICES}; a share to trim is below 0.5")


def fewest(text: str) -> int:
    """Return how many clients the rule that `text` names needs in a round."""
    rule = parse(text)
    for n in itertools.count(1):
        with contextlib.suppress(ConfigError):
            rule(torch.zeros(n, 1))
            return n
    raise AssertionError  # every rule is content with some number


def _rule(name: str, colon: str, given: str) -> Rule | None:
    """Return the single rule of this name."""
    if name in ("median", "geometric-median") and not colon:
        return median if name == "median" else geometric_median
    if name == "trimmed" and 0 <= float(given) < 0.5:
        return functools.partial(trimmed, share=float(given))
    if name in ("krum", "multi-krum") and int(given) >= 0:
        return functools.partial(krum if name == "krum" else multi_krum, hostile=int(given))
    if name == "clip" and (given == "auto" or 0 < float(given) < float("inf")):
        return functools.partial(clip, radius=None if given == "auto" else float(given))
    return None


def averaged_fields(method: AnyMethod) -> tuple[str, ...]:
    """Return the fields of the method's messages that reach the server's state by their weighted mean only."""
    if method.averaged is not None:
        return method.averaged
    kinds: dict[Any, tuple[str, ...]] = {CountedParams: ("params",), TrainedAndBuffers: ("trained", "buffers")}
    return kinds.get(up_type(method), ())


def up_type(method: AnyMethod) -> Any:
    """Return the type of the method's messages, as its class declares it; None if it does not."""
    bases = (base for cls in type(method).__mro__ for base in cls.__dict__.get("__orig_bases__", ()))
    return next((get_args(base)[3] for base in bases if len(get_args(base)) == 4), None)


def robust(method: AnyMethod, rule: str) -> AnyMethod:
    """Return the method with `aggregate` wrapped: its messages are made robust first.

    Raises:
        ConfigError: the method does not average, or there is no such rule.
    """
    fields = averaged_fields(method)
    if not fields:
        raise ConfigError(
            [
                f"robust = {rule!r}: {type(method).__name__} does not average the models that it is sent, "
                "so leave robust out, or choose a method that averages"
            ]
        )
    apply, wrapped = parse(rule), copy.copy(method)

    def aggregate(server: Any, ids: Tensor, ups: Any) -> Any:
        models = {name: getattr(ups, name) for name in fields}
        return method.aggregate(server, ids, ups._replace(**_on_rows(apply, models)))

    # An attribute of the instance goes before the class's function, in every engine and on every server.
    object.__setattr__(wrapped, "aggregate", aggregate)
    return wrapped


def _on_rows(rule: Rule, models: Tree) -> Any:
    """Apply a rule to rows of models, all leaves of a client being one vector."""
    flat = tree.pack(models)
    if not flat or len(next(iter(flat.values()))) < 2:
        return models
    parts = {path: leaf.reshape(len(leaf), -1) for path, leaf in flat.items()}
    joined = rule(torch.cat([part.double() for part in parts.values()], 1))
    pieces = torch.split(joined, [part.shape[1] for part in parts.values()], 1)
    new = {}
    for (path, leaf), piece in zip(flat.items(), pieces, strict=True):
        value = piece.reshape(leaf.shape)
        new[path] = (value if leaf.is_floating_point() else value.round()).to(leaf.dtype)
    return tree.rebuild(new, models)
