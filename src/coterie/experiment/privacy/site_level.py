"""Privacy of a client as a whole: what it sends is clipped and noised, part by part.

A message has parts: its fields, but for weights. With m parts, K clients in the round, the noise sigma that was asked
for, and a part's clip C:

    local      part <- sent + clip(part - sent, C) + C sqrt(m) sigma z              each client adds the noise
    central    part <- sent + clip(part - sent, C) + C sqrt(m / K) sigma z          the server adds it, so that in the
                                                                                    mean it is C sqrt(m) sigma / K

z ~ N(0, I), and `sent` is what the client was sent under the same names, or 0. So all parts together cost what one sum
with the noise sigma does. What a client weighs is not sent: all weigh the same, unless their weight is a part, as
FedMAP's log-weight is with --weighting omega. Centrally, everything sent must be averaged; what a server does with
messages that are noisy already, it may do with any.

Models are clipped as a difference to what was sent, by `clip`; numbers, such as a log-weight, by `clip_loss`; and
moments of features by `clip_features`.

Adjacency: one client is replaced by one that says nothing new, that is, whose differences are 0.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import rng, tree
from coterie.core.method import EXAMPLE_COUNT_NAMES
from coterie.core.privacy import ROUNDING, system_normals
from coterie.core.tree import Tree
from coterie.methods.fields import AnyMethod
from coterie.parts.robust import averaged_fields

WEIGHTS = {"count": 1.0, "size": 1.0, "log_weight": 0.0}  # what a client weighs, and what everybody says instead
CHANGES = ("change", "update")  # fields that are differences already
ALL = ""  # the part of a message that is one model, and no fields


class Part(NamedTuple):
    """A part of a message."""

    name: str
    clip: float
    from_sent: bool  # whether it is clipped as a difference to what was sent


@dataclasses.dataclass(frozen=True)
class Shares:
    """How the parts of a message are clipped and noised."""

    level: str
    parts: tuple[Part, ...]
    noise: float  # of a part, relative to its clip
    entropy: str = "seed"
    clips_only: bool = False  # a site whose server adds the noise

    def apply(self, seed: int, round: int, names: list[str], down: Tree, ups: Any) -> Any:
        """Return the messages of a round as they are sent or, centrally, as the server takes them.

        Args:
            seed: the run's seed.
            round: its number.
            names: the senders' names; a client's noise is its own.
            down: what they were sent, leaves [clients, ...].
            ups: their messages, leaves [clients, ...].
        """
        sent = _by_name(down)
        share = 1 / math.sqrt(len(names)) if self.level == "site-central" else 1.0
        noise = 0.0 if self.clips_only else share * self.noise
        new = {}
        for place, part in enumerate(self.parts):
            value = ups if part.name == ALL else getattr(ups, part.name)
            keys = [rng.seed_of(seed, "site noise", round, name, place) >> 2 for name in names]
            new[part.name] = self._protected(value, part, sent if part.from_sent else {}, keys, noise)
            if part.name == "log_weight":
                new[part.name] = new[part.name].clamp_max(0)  # as it is without noise
            elif part.name in EXAMPLE_COUNT_NAMES:
                new[part.name] = new[part.name].clamp(0, 1)  # of a class, whether there is one
            elif part.name == "spread":
                new[part.name] = new[part.name].clamp_min(0)  # a precision
        if ALL in new:
            return new[ALL]
        weights = {
            name: torch.full_like(getattr(ups, name), to)
            for name, to in WEIGHTS.items()
            if name not in new and isinstance(getattr(ups, name, None), Tensor)
        }
        return ups._replace(**new, **weights)

    def _protected(self, value: Any, part: Part, sent: dict[str, Tensor], keys: list[int], noise: float) -> Any:
        flat = tree.pack(value)
        start = {name: _start(sent, name, leaf) for name, leaf in flat.items()}
        away = {name: torch.nan_to_num((leaf - start[name]).double(), 0.0, 0.0, 0.0) for name, leaf in flat.items()}
        rows = torch.cat([leaf.reshape(len(leaf), -1) for leaf in away.values()], 1)
        rows = rows * (part.clip * ROUNDING / rows.norm(dim=1, keepdim=True).clamp_min(1e-300)).clamp_max(1)
        if noise:
            scale = part.clip if math.isfinite(part.clip) else 1.0
            rows = rows + noise * scale * torch.stack([self._normals(rows[0], key) for key in keys])
        pieces = torch.split(rows, [leaf[0].numel() for leaf in away.values()], 1)
        made = {
            name: piece.reshape(leaf.shape).to(leaf) + start[name]
            for (name, leaf), piece in zip(flat.items(), pieces, strict=True)
        }
        return tree.rebuild(made, value)

    def _normals(self, like: Tensor, key: int) -> Tensor:
        if self.entropy == "system":
            return system_normals(like)
        drawn = torch.randn(like.shape, dtype=like.dtype, generator=torch.Generator().manual_seed(key))
        return drawn.to(like.device)


def parts_of(method: AnyMethod, up: Any, clip: float, clip_features: float, clip_loss: float) -> tuple[Part, ...]:
    """Return the parts of a message `up`; weights are none, but for a log-weight that depends on losses."""
    if not hasattr(up, "_fields"):
        return (Part(ALL, clip, True),)
    models = {*averaged_fields(method), "theta", "trained", "params", "body", "buffers", *CHANGES}
    found = []
    for name in up._fields:
        value = getattr(up, name)
        weighs = name in WEIGHTS and not (name == "log_weight" and getattr(method, "weighting", "") == "omega")
        if weighs or not tree.leaves(value):
            continue
        number = isinstance(value, Tensor) and value.ndim == 0
        own = clip if name in models else clip_loss if number else clip_features
        changes = name in CHANGES or (type(method).__name__ == "ClusteredFL" and name == "trained")
        found.append(Part(name, own, name in models and not changes))
    return tuple(found)


def _by_name(down: Tree) -> dict[str, Tensor]:
    """Return the leaves of what was sent by the last part of their path; of the same names, the first."""
    found: dict[str, Tensor] = {}
    for path, leaf in tree.pack(down).items():
        found.setdefault(path.rpartition("/")[2], leaf)
    return found


def _start(sent: dict[str, Tensor], path: str, leaf: Tensor) -> Tensor:
    known = sent.get(path.rpartition("/")[2])
    return torch.zeros_like(leaf) if known is None or known.shape != leaf.shape else known.to(leaf)
