"""A model and its loss as pure functions of named parameters.

`Task` wraps any `nn.Module`. A model is a flat dict of its parameters *and* buffers (`Params`); running statistics of
normalisation layers come back as a result instead of being changed in place. The task knows which names are trained,
which belong to the head (the last linear layer, unless named) and which to normalisation layers (by module type).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from coterie.core import tree
from coterie.core.attention import AttentionInProducts
from coterie.core.batches import MIN_TOTAL_WEIGHT, Batch
from coterie.core.decode import Decoder
from coterie.core.dropout import KeyedDropout
from coterie.core.modules import NORMS, find_head, first_names, places_of, structure_of, tensors_of
from coterie.core.precision import BFloat16
from coterie.core.targets import Classes, Numbers, Target
from coterie.core.tree import Params, T

LossFn = Callable[[Tensor, Tensor], Tensor]
Augment = Callable[[Tensor, Tensor], Tensor]  # (inputs [batch, ...], key) -> inputs
_AUGMENT_KEY = 0x27D4EB2F << 30  # tells keys of augmentation from keys of dropout


class Task:
    """All that a method may know of the model.

    - `logits(params, x)`: the outputs, in evaluation mode; `features(params, x)`: what enters the head;
      `head(params, z)`: the head applied to features.
    - `losses(params, x, y)`: one loss an example, in evaluation mode.
    - `target`: what is to be predicted, and what outputs mean (`coterie.core.targets`).
    - `loss(params, batch)`: the mean training loss over the examples, each counting its mask, and the updated buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        kind: Target | str = "classification",
        *,
        num_classes: int | None = None,
        head: str | None = None,
        loss: LossFn | None = None,
        decode: Decoder | None = None,
        bf16: bool = False,
        augment: Augment | None = None,
        metrics: tuple[str, ...] = (),
    ) -> None:
        if isinstance(kind, str) and kind not in ("classification", "regression"):
            raise ValueError(f"kind is 'classification', 'regression' or a target, not {kind!r}")
        if any(map(nn.parameter.is_lazy, [*module.parameters(), *module.buffers()])):
            raise ValueError("the model has lazy layers: call it once on an example so that its shapes are known")
        named = Classes(num_classes) if kind == "classification" else Numbers()
        self.target = named if isinstance(kind, str) else kind  # what outputs mean
        self.num_classes = self.target.num_classes  # of which the outputs are logits; None if they are anything else
        self.decode = decode  # of bytes, and of whole numbers that the model does not take as they are
        self.augment = augment  # changes inputs at random, in training steps only
        self.bf16 = bf16  # products of training steps in half the bits (`coterie.core.precision`)
        self._train = copy.deepcopy(module).train()
        self._eval = copy.deepcopy(module).eval()
        self.own_loss = loss  # None: the target's
        self.metrics = metrics  # names of the user's own
        self._first_name = first_names(module)
        self._places = places_of(self._eval, self._first_name)
        self.trainable = frozenset(name for name, p in module.named_parameters() if p.requires_grad)
        if not self.trainable:
            raise ValueError("the model has no trainable parameter")
        self.norm_names = self._under([name for name, m in module.named_modules() if isinstance(m, NORMS)])
        self.unsent = self.norm_names & self._uncounted(module) | frozenset(
            self._first_name[name] for name, p in module.named_parameters() if not p.requires_grad
        )
        self.convolves = any(isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d) for m in module.modules())
        self.attends = any(isinstance(m, nn.MultiheadAttention) for m in module.modules())
        self.head_module = find_head(module, head)
        self.head_names = self._under([] if self.head_module is None else [self.head_module])
        self.head_is_last: bool | None = None  # whether outputs are the head's; None: nobody looked (`make_task` does)
        self._structure = (self.target, head, loss, decode, bf16, augment, structure_of(self._train))

    def __eq__(self, other: object) -> bool:
        """Return whether both compute the same functions of parameters and data, whatever their models begin at.

        So the seeds of a comparison share compiled steps, and can be stacked.
        """
        return self is other or (isinstance(other, Task) and self._structure == other._structure)

    def __hash__(self) -> int:
        return hash((self.target, self.trainable, tuple(self._first_name)))

    def parts(self) -> tuple[Any, ...]:
        """Return what two tasks must have in common to be equal; the module last, whose values do not matter."""
        return (*self._structure[:-1], self._train)

    def init(self) -> Params:
        """Return the wrapped module's own parameters and buffers."""
        tensors = tensors_of(self._eval)
        return {name: tensors[name].detach().clone() for name in dict.fromkeys(self._first_name.values())}

    def module(self, params: Params) -> nn.Module:
        """Return a copy of the wrapped module that has these parameters and buffers, in evaluation mode."""
        module = copy.deepcopy(self._eval)
        with torch.no_grad():
            for name, tensor in tensors_of(module).items():
                tensor.copy_(params[self._first_name[name]])
        return module

    def beginning(self, params: Params, only: frozenset[str] | None = None) -> Task:
        """Return the task of the same model that begins at `params` and, with `only`, trains nothing else."""
        module = self.module(params)
        if only is not None:
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and name in only)
        same: dict[str, Any] = {key: getattr(self, key) for key in ("decode", "bf16", "augment", "metrics")}
        return Task(module, self.target, head=self.head_module or None, loss=self.own_loss, **same)

    def split(self, params: Params) -> tuple[Params, Params]:
        """Divide a model into its trained parameters and everything else."""
        trained = {name: value for name, value in params.items() if name in self.trainable}
        return trained, {name: value for name, value in params.items() if name not in self.trainable}

    def sent(self, message: T) -> T:
        """Return what is sent of a model, or of a message with models in it: all but what is under the names `unsent`.

        These are frozen parameters, which everybody has from the start, and BatchNorm's counts of minibatches, which
        nothing reads unless the momentum is None. Whatever a message has under such a name never changes: who gets one
        takes it from the message of a server that has just begun (`tree.filled`).
        """
        return tree.without(message, self.unsent)

    def logits(self, params: Params, x: Tensor) -> Tensor:
        """Return the model's outputs, [batch, ...], in evaluation mode.

        It is `functional_call`, which takes longer to find where the tensors of a module are than a small model runs.
        Like it, this is not for two threads at once: give each a copy of the task.
        """
        x = self.decoded(x)
        try:
            for own, key, name, _ in self._places:
                own[key] = params[name]
            with AttentionInProducts() if self.attends else contextlib.nullcontext():
                return self._eval(x)  # type: ignore[no-any-return]
        finally:
            for own, key, _, original in self._places:
                own[key] = original

    def losses(self, params: Params, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return one loss an example, in evaluation mode; only joint losses look at the examples' weights."""
        return self.output_losses(self.logits(params, x), y, weight)

    def output_losses(self, outputs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return one loss an example, from outputs that are there already.

        Raises:
            ValueError: the user's own loss gives something else.
        """
        losses = self.target.losses(outputs, y, weight) if self.own_loss is None else self.own_loss(outputs, y)
        if losses.shape != outputs.shape[:1]:
            raise ValueError(f"the loss must give one number an example, {outputs.shape[0]}, not {tuple(losses.shape)}")
        return losses

    @property
    def kind(self) -> str:
        """Return the name of the kind of target."""
        return self.target.kind

    @property
    def log_loss(self) -> bool:
        """Return whether the loss is -log p_y of a classification."""
        return self.own_loss is None and isinstance(self.target, Classes)

    @property
    def joint(self) -> bool:
        """Return whether the loss of an example depends on the others of its minibatch, as Cox's does."""
        return self.own_loss is None and self.target.joint

    def loss(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Compute the loss of a training step.

        Returns:
            The loss, sum mask_i loss_i / sum mask_i, and what the forward pass left of the untrained values.
        """
        outputs, rest = self._train_pass(params, batch)
        return self.batch_loss(outputs, batch), rest

    def batch_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return sum mask_i loss_i / sum mask_i, from outputs that are there already."""
        losses = self.output_losses(outputs, batch.y, batch.mask)
        return (losses * batch.mask).sum() / batch.mask.sum().clamp_min(MIN_TOTAL_WEIGHT)

    def outputs_and_features(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor, Params]:
        """Do one forward pass in training mode, for losses of your own.

        Returns:
            The outputs; what entered the head on the way, [batch, feature_dim]; and what the pass left of the untrained
            values.
        """
        caught: list[Tensor] = []
        hook = self._head_of(self._train).register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
        try:
            outputs, rest = self._train_pass(params, batch)
        finally:
            hook.remove()
        return outputs, caught[-1], rest

    def loss_and_features(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor, Params]:
        """Do what `loss` does, and return what entered the head on the way, [batch, feature_dim], between the two."""
        outputs, features, rest = self.outputs_and_features(params, batch)
        return self.batch_loss(outputs, batch), features, rest

    def _train_pass(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Return outputs in training mode, and what the forward pass left of the untrained values."""
        trained, rest = self.split(params)
        # Normalisation layers write their running statistics in place: give them copies of this call's own.
        rest = {name: value.clone() for name, value in rest.items()}
        x = self.decoded(batch.x)
        if self.augment is not None:
            x = self.augment(x, batch.key ^ _AUGMENT_KEY)
        with KeyedDropout(batch.key), BFloat16() if self.bf16 else contextlib.nullcontext():
            outputs = functional_call(self._train, {**trained, **rest}, (x,))
        return outputs, rest

    def features(self, params: Params, x: Tensor) -> Tensor:
        """Return what enters the head, [batch, feature_dim], in evaluation mode."""
        caught: list[Tensor] = []
        hook = self._head_of(self._eval).register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
        try:
            self.logits(params, x)
        finally:
            hook.remove()
        return caught[-1]

    def head(self, params: Params, features: Tensor) -> Tensor:
        """Apply the head alone to features. This gives `logits` when nothing follows the head in the model."""
        head = self.head_layer
        prefix = f"{self.head_module}." if self.head_module else ""
        own = {name: params[self._first_name[prefix + name]] for name in tensors_of(head)}
        return functional_call(head, own, (features,))  # type: ignore[no-any-return]

    @property
    def head_layer(self) -> nn.Module:
        """Return the layer that is the head; raise `ValueError` in words if the model has none."""
        return self._head_of(self._eval)

    @property
    def feature_dim(self) -> int:
        """Return how many numbers enter the head; raise `ValueError` if it is no linear layer."""
        head = self.head_layer
        if not isinstance(head, nn.Linear):
            raise ValueError(f"the head '{self.head_module}' is a {type(head).__name__}: its input width is not known")
        return head.in_features

    def decoded(self, x: Tensor) -> Tensor:
        """Return inputs as the model takes them."""
        return x if self.decode is None else self.decode(x)

    def _head_of(self, module: nn.Module) -> nn.Module:
        if self.head_module is None:
            raise ValueError("this model has no linear layer to be its head: name one with head='layer.name'")
        return module.get_submodule(self.head_module)

    def _uncounted(self, module: nn.Module) -> frozenset[str]:
        """Return the names of counts of minibatches that no layer reads."""
        layers = [(name, m) for name, m in module.named_modules() if getattr(m, "momentum", None) is not None]
        names = [f"{name}.num_batches_tracked".lstrip(".") for name, _ in layers]
        return frozenset(self._first_name[name] for name in names if name in self._first_name)

    def _under(self, modules: list[str]) -> frozenset[str]:
        """Return the names of the parameters and buffers that belong to any of `modules`."""
        names = [name for name in self._first_name if any(not part or name.startswith(f"{part}.") for part in modules)]
        return frozenset(self._first_name[name] for name in names)
