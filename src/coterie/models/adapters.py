"""Adapters: a frozen model with a few trained parameters beside its layers (LoRA: Hu et al., 2021, ICLR 2022).

A linear layer with frozen weight W [out, in] gets two narrow matrices, A [rank, in] and B [out, rank]:

    h = W x + bias + (alpha / rank) B A x                           (`AdaptedLinear`; section 4.1)

A begins Gaussian and B at 0, so that the model begins where it was. Everything else is frozen but the head, which is
trained as it is, since its classes are the task's own. PyTorch's attention keeps three projections in one weight, which
gets one such pair (`AdaptedAttention`).

Frozen parameters are the same everywhere, and no client sends them (`Task.sent`). The statistics of a BatchNorm layer
are part of a frozen model, too: the layer stays in evaluation mode, and its statistics count as frozen parameters.

A server that averages takes the means of A and of B. The product of two means is not the mean of the products: with
clients i of equal weight, mean(B_i) mean(A_i) = mean(B_i A_i) only where all B_i, or all A_i, are equal. So averaging
does less than averaging the models would, by the covariance of B_i and A_i over clients; `freeze_a` trains B alone
(Sun et al., FFA-LoRA, 2024), and then the mean is exact.
"""

from __future__ import annotations

import copy
import fnmatch
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core.errors import ConfigError
from coterie.core.modules import find_head
from coterie.core.tree import Params

A, B = "_lora_a", "_lora_b"  # what follows the name of a weight in the names of its two matrices
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_IN_ONE, _APART = "in_proj_weight", ("q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclass(frozen=True)
class LoRA:
    """Low-rank updates of linear layers and attention projections.

    Attributes:
        rank: the rank of an update.
        alpha: updates are scaled by alpha / rank.
        layers: which layers, by a part of their name between dots (`query`), or a pattern (`layers.1.*`).
        freeze_a: train B alone, so that averages are exact.
    """

    rank: int = 4
    alpha: float = 8.0
    layers: tuple[str, ...] = ("*",)
    freeze_a: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise ConfigError([f"adapter: rank = {self.rank} must be at least 1, and alpha = {self.alpha:g} above 0"])

    def __call__(self, module: nn.Module, head: str | None = None) -> nn.Module:
        """Return a copy of a model with updates beside its layers, of which nothing else but the head is trained.

        Raises:
            ConfigError: a word of `layers` fits no layer.
        """
        module = copy.deepcopy(module)
        head = find_head(module, head)
        for name, each in module.named_modules():
            inside = head is not None and (name == head or name.startswith(f"{head}."))
            for parameter in each.parameters(recurse=False):
                parameter.requires_grad_(inside and parameter.requires_grad)
        able = {n: m for n, m in module.named_modules() if _is_able(m) and n != head}
        chosen = {n for n in able if any(_fits(n, word) for word in self.layers)}
        lost = [word for word in self.layers if not any(_fits(n, word) for n in able)]
        if lost or not chosen:
            if not able:
                raise ConfigError(["adapter: the model has no linear layer or attention beside its head to update"])
            called = f"no linear layer of the model is called {', '.join(lost)}; it has {', '.join(able)}"
            raise ConfigError([f"adapter: {called}"])
        for name, each in able.items():
            if name in chosen:
                self._adapt(each)
        for each in module.modules():
            if isinstance(each, _NORMS):
                _freeze_statistics(each)
        return module

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    def merged(self, flat: Params) -> Params:
        """Return a model's tensors, by name, with the updates added to the weights: W + (alpha / rank) B A."""
        found = {name: value for name, value in flat.items() if not name.endswith((A, B))}
        return {
            name: value if name + A not in flat else value + self.scale * flat[name + B] @ flat[name + A]
            for name, value in found.items()
        }

    def _adapt(self, layer: nn.Module) -> None:
        layer.__class__ = AdaptedLinear if isinstance(layer, nn.Linear) else AdaptedAttention
        object.__setattr__(layer, "lora_scale", self.scale)
        for name, weight in list(layer.named_parameters(recurse=False)):
            if name in ("weight", _IN_ONE, *_APART):
                out, into = weight.shape
                start = torch.randn(self.rank, into, dtype=weight.dtype) / into**0.5
                narrow = nn.Parameter(start, requires_grad=not self.freeze_a)
                layer.register_parameter(name + A, narrow)
                layer.register_parameter(name + B, nn.Parameter(weight.new_zeros(out, self.rank)))


class AdaptedLinear(nn.Linear):
    """A linear layer with an update; who reads its `weight` gets the sum of both."""

    lora_scale: float

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return _sum(self, "weight")  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        own = self._parameters
        update = F.linear(F.linear(x, own["weight" + A]), own["weight" + B])  # type: ignore[arg-type]
        return F.linear(x, own["weight"], self.bias) + self.lora_scale * update  # type: ignore[arg-type]


class AdaptedAttention(nn.MultiheadAttention):
    """PyTorch's attention, whose projections have updates."""

    lora_scale: float

    @property
    def in_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        return _sum(self, _IN_ONE)  # type: ignore[no-any-return]

    @property
    def q_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        return _sum(self, _APART[0])  # type: ignore[no-any-return]

    @property
    def k_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        return _sum(self, _APART[1])  # type: ignore[no-any-return]

    @property
    def v_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        return _sum(self, _APART[2])  # type: ignore[no-any-return]


def merge(module: nn.Module) -> nn.Module:
    """Add the updates of a model to its weights, in place: its layers are ordinary ones again."""
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, AdaptedLinear | AdaptedAttention):
                for name in [each for each in layer._parameters if each + A in layer._parameters]:
                    layer._parameters[name] = nn.Parameter(_sum(layer, name), requires_grad=True)
                    del layer._parameters[name + A], layer._parameters[name + B]
                kind: Any = nn.Linear if isinstance(layer, AdaptedLinear) else nn.MultiheadAttention
                layer.__class__ = kind
    return module


def lora(
    module: nn.Module,
    rank: int = 4,
    alpha: float = 8.0,
    layers: tuple[str, ...] = ("*",),
    *,
    freeze_a: bool = False,
    head: str | None = None,
) -> nn.Module:
    """Return a copy of a model with low-rank updates beside its linear layers, which are frozen (see `LoRA`).

    Args:
        module: the model, perhaps with weights that were trained elsewhere.
        rank: the rank of an update.
        alpha: updates are scaled by alpha / rank.
        layers: which layers: parts of their names between dots, or patterns. By default all linear layers and attention
            projections but the head.
        freeze_a: train B alone, so that averages over clients are exact.
        head: the layer that is trained as it is; by default the last linear layer.

    Raises:
        ConfigError: no layer has such a name.

    Examples:
        >>> import torch, coterie
        >>> model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.ReLU(), torch.nn.Linear(100, 2))
        >>> adapted = coterie.lora(model, rank=2)
        >>> sum(p.numel() for p in adapted.parameters() if p.requires_grad)  # 2 x 100 + 100 x 2, and the head's 202
        602
    """
    return LoRA(rank, alpha, tuple(layers), freeze_a)(module, head)


def find_adapter(text: str) -> LoRA:
    """Build what text such as `lora:rank=4:alpha=8:layers=query/value` names.

    Raises:
        ConfigError: there is no such adapter, or it does not have these options.
    """
    from coterie.models import options_from_words

    name, *words = text.split(":")
    if name != "lora":
        raise ConfigError([f"there is no adapter '{name}'; there is lora, as in lora:rank=4:alpha=8"])
    known = {each: LoRA.__dataclass_fields__[each].default for each in LoRA.__dataclass_fields__}
    return LoRA(**options_from_words("adapter", text, known, words))


def _sum(layer: Any, name: str) -> Any:
    own = layer._parameters
    if own.get(name) is None or name + A not in own:
        return own.get(name)
    return own[name] + layer.lora_scale * (own[name + B] @ own[name + A])


def _is_able(module: nn.Module) -> bool:
    """Tell whether it is a linear layer or an attention of PyTorch's: another class may use its weight otherwise."""
    plain = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear, nn.MultiheadAttention)
    return type(module) in plain


def _fits(name: str, word: str) -> bool:
    return word in name.split(".") or fnmatch.fnmatch(name, word)


class _Frozen1d(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Any:
        return super().train(False)


class _Frozen2d(nn.BatchNorm2d):
    def train(self, mode: bool = True) -> Any:
        return super().train(False)


class _Frozen3d(nn.BatchNorm3d):
    def train(self, mode: bool = True) -> Any:
        return super().train(False)


def _freeze_statistics(layer: nn.Module) -> None:
    """Keep a BatchNorm layer in evaluation mode; its statistics become frozen parameters, under the same names."""
    kinds: dict[Any, Any] = {nn.BatchNorm1d: _Frozen1d, nn.BatchNorm2d: _Frozen2d, nn.BatchNorm3d: _Frozen3d}
    layer.__class__ = kinds[type(layer)]
    for name, value in list(layer._buffers.items()):
        if value is not None:
            del layer._buffers[name]
            layer.register_parameter(name, nn.Parameter(value, requires_grad=False))
    layer.eval()
