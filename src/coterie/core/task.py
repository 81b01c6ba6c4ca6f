"""A model and its loss as pure functions of named parameters.

`Task` wraps any `nn.Module`. A model is a flat dict of its parameters *and* buffers (`Params`); running statistics of
normalisation layers come back as a result instead of being changed in place. The task knows which names are trained,
which belong to the head (the last linear layer, unless named) and which to normalisation layers (by module type).
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from coterie.core import tree
from coterie.core.attention import AttentionInProducts
from coterie.core.batches import MIN_TOTAL_WEIGHT, Batch
from coterie.core.decode import Decoder, as_floats
from coterie.core.dropout import KeyedDropout
from coterie.core.precision import BFloat16
from coterie.core.targets import Classes, Numbers, Target
from coterie.core.tree import Params, T
from coterie.core.user_code import in_user_code

LossFn = Callable[[Tensor, Tensor], Tensor]
Augment = Callable[[Tensor, Tensor], Tensor]  # (inputs [batch, ...], key) -> inputs
_AUGMENT_KEY = 0x27D4EB2F << 30  # tells keys of augmentation from keys of dropout

_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)


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
        self._first_name = _first_names(module)
        self._places = _places(self._eval, self._first_name)
        self.trainable = frozenset(name for name, p in module.named_parameters() if p.requires_grad)
        if not self.trainable:
            raise ValueError("the model has no trainable parameter")
        self.norm_names = self._under([name for name, m in module.named_modules() if isinstance(m, _NORMS)])
        self.unsent = self.norm_names & self._uncounted(module) | frozenset(
            self._first_name[name] for name, p in module.named_parameters() if not p.requires_grad
        )
        self.convolves = any(isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d) for m in module.modules())
        self.attends = any(isinstance(m, nn.MultiheadAttention) for m in module.modules())
        self.head_module = find_head(module, head)
        self.head_names = self._under([] if self.head_module is None else [self.head_module])
        self.head_is_last: bool | None = None  # whether outputs are the head's; None: nobody looked (`make_task` does)
        self._structure = (self.target, head, loss, decode, bf16, augment, _structure(self._train))

    def __eq__(self, other: object) -> bool:
        """Whether both compute the same functions of parameters and data, whatever their models begin at.

        So the seeds of a comparison share compiled steps, and can be stacked.
        """
        return self is other or (isinstance(other, Task) and self._structure == other._structure)

    def __hash__(self) -> int:
        return hash((self.target, self.trainable, tuple(self._first_name)))

    def parts(self) -> tuple[Any, ...]:
        """What two tasks must have in common to be equal; the module last, whose values do not matter."""
        return (*self._structure[:-1], self._train)

    def init(self) -> Params:
        """The wrapped module's own parameters and buffers."""
        tensors = _tensors(self._eval)
        return {name: tensors[name].detach().clone() for name in dict.fromkeys(self._first_name.values())}

    def module(self, params: Params) -> nn.Module:
        """A copy of the wrapped module that has these parameters and buffers, in evaluation mode."""
        module = copy.deepcopy(self._eval)
        with torch.no_grad():
            for name, tensor in _tensors(module).items():
                tensor.copy_(params[self._first_name[name]])
        return module

    def beginning(self, params: Params, only: frozenset[str] | None = None) -> Task:
        """The same model that begins at `params` and, with `only`, trains nothing else."""
        module = self.module(params)
        if only is not None:
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and name in only)
        same: dict[str, Any] = {key: getattr(self, key) for key in ("decode", "bf16", "augment", "metrics")}
        return Task(module, self.target, head=self.head_module or None, loss=self.own_loss, **same)

    def split(self, params: Params) -> tuple[Params, Params]:
        """(trained parameters, everything else)."""
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
        """The model's outputs, [batch, ...], in evaluation mode.

        It is `functional_call`, which takes longer to find where the tensors of a module are than a small model runs.
        Like it, this is not for two threads at once: give each a copy of the task.
        """
        x = self._decoded(x)
        try:
            for own, key, name, _ in self._places:
                own[key] = params[name]
            with AttentionInProducts() if self.attends else contextlib.nullcontext():
                return self._eval(x)  # type: ignore[no-any-return]
        finally:
            for own, key, _, original in self._places:
                own[key] = original

    def losses(self, params: Params, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        return self.output_losses(self.logits(params, x), y, weight)

    def output_losses(self, outputs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """One loss an example, from outputs that are there already; only joint losses look at the examples' weights."""
        losses = self.target.losses(outputs, y, weight) if self.own_loss is None else self.own_loss(outputs, y)
        if losses.shape != outputs.shape[:1]:
            raise ValueError(f"the loss must give one number an example, {outputs.shape[0]}, not {tuple(losses.shape)}")
        return losses

    @property
    def kind(self) -> str:
        """The name of the kind of target."""
        return self.target.kind

    @property
    def log_loss(self) -> bool:
        """Whether the loss is -log p_y of a classification."""
        return self.own_loss is None and isinstance(self.target, Classes)

    @property
    def joint(self) -> bool:
        """Whether the loss of an example depends on the others of its minibatch, as Cox's does."""
        return self.own_loss is None and self.target.joint

    def loss(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """(training loss, sum mask_i loss_i / sum mask_i, what the forward pass left of the untrained values)."""
        outputs, rest = self._train_pass(params, batch)
        return self.batch_loss(outputs, batch), rest

    def batch_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """sum mask_i loss_i / sum mask_i, from outputs that are there already."""
        losses = self.output_losses(outputs, batch.y, batch.mask)
        return (losses * batch.mask).sum() / batch.mask.sum().clamp_min(MIN_TOTAL_WEIGHT)

    def outputs_and_features(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor, Params]:
        """One forward pass in training mode, for losses of your own.

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
        """`loss` with, in the middle, what entered the head on the way, [batch, feature_dim]: one forward pass."""
        outputs, features, rest = self.outputs_and_features(params, batch)
        return self.batch_loss(outputs, batch), features, rest

    def _train_pass(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """(outputs in training mode, what the forward pass left of the untrained values)."""
        trained, rest = self.split(params)
        # Normalisation layers write their running statistics in place: give them copies of this call's own.
        rest = {name: value.clone() for name, value in rest.items()}
        x = self._decoded(batch.x)
        if self.augment is not None:
            x = self.augment(x, batch.key ^ _AUGMENT_KEY)
        with KeyedDropout(batch.key), BFloat16() if self.bf16 else contextlib.nullcontext():
            outputs = functional_call(self._train, {**trained, **rest}, (x,))
        return outputs, rest

    def features(self, params: Params, x: Tensor) -> Tensor:
        """What enters the head, [batch, feature_dim]."""
        caught: list[Tensor] = []
        hook = self._head_of(self._eval).register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
        try:
            self.logits(params, x)
        finally:
            hook.remove()
        return caught[-1]

    def head(self, params: Params, features: Tensor) -> Tensor:
        """The head on its own. Equals `logits` when nothing follows the head in the model."""
        head = self._head_of(self._eval)
        prefix = f"{self.head_module}." if self.head_module else ""
        own = {name: params[self._first_name[prefix + name]] for name in _tensors(head)}
        return functional_call(head, own, (features,))  # type: ignore[no-any-return]

    @property
    def feature_dim(self) -> int:
        head = self._head_of(self._eval)
        if not isinstance(head, nn.Linear):
            raise ValueError(f"the head '{self.head_module}' is a {type(head).__name__}: its input width is not known")
        return head.in_features

    def _decoded(self, x: Tensor) -> Tensor:
        return x if self.decode is None else self.decode(x)

    def _head_of(self, module: nn.Module) -> nn.Module:
        if self.head_module is None:
            raise ValueError("this model has no linear layer to be its head: name one with head='layer.name'")
        return module.get_submodule(self.head_module)

    def _uncounted(self, module: nn.Module) -> frozenset[str]:
        """Names of counts of minibatches that no layer reads."""
        layers = [(name, m) for name, m in module.named_modules() if getattr(m, "momentum", None) is not None]
        names = [f"{name}.num_batches_tracked".lstrip(".") for name, _ in layers]
        return frozenset(self._first_name[name] for name in names if name in self._first_name)

    def _under(self, modules: list[str]) -> frozenset[str]:
        """Names of the parameters and buffers that belong to any of `modules`."""
        names = [name for name in self._first_name if any(not part or name.startswith(f"{part}.") for part in modules)]
        return frozenset(self._first_name[name] for name in names)


def find_head(module: nn.Module, name: str | None) -> str | None:
    """Return the name of a model's head: `name` if it has such a layer, by default its last linear layer, if any."""
    if name is None:
        linear = [key for key, m in module.named_modules() if isinstance(m, nn.Linear)]
        return linear[-1] if linear else None
    known = [key for key, m in module.named_modules() if key and any(True for _ in m.parameters())]
    if name not in known:
        raise ValueError(f"the model has no layer '{name}' with parameters; it has {', '.join(known)}")
    return name


def _tensors(module: nn.Module) -> Params:
    """Parameters and buffers by every name they have (tied ones have several)."""
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])


def _first_names(module: nn.Module) -> dict[str, str]:
    """{every name: the first name of the same tensor}; a model is keyed by first names only."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in _tensors(module).items()}


def _places(module: nn.Module, first_name: dict[str, str]) -> list[tuple[dict[str, Any], str, str, Any]]:
    """Where a module has its tensors: the dict and the key there, the first name of the tensor, and the tensor."""
    places = []
    for name, first in first_name.items():
        owner, _, key = name.rpartition(".")
        inside = module.get_submodule(owner)
        home: dict[str, Any] = inside._parameters if key in inside._parameters else inside._buffers
        places.append((home, key, first, home[key]))
    return places


def _structure(module: nn.Module) -> tuple[Any, ...]:
    """All that a module is but for the values of its parameters and buffers. What cannot be compared (a tensor that is
    no buffer, an object of another library) stands for itself: such modules differ from all others."""
    known = {id(tensor): ("tensor", name) for name, tensor in _tensors(module).items()}

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            shape = (tuple(value.shape), value.dtype, value.requires_grad)
            return known[id(value)] + shape if id(value) in known else ("object", id(value))
        if isinstance(value, nn.Module):
            return type(value), plain(vars(value))
        if isinstance(value, dict):
            return tuple((key, plain(each)) for key, each in value.items())
        if isinstance(value, list | tuple):
            return type(value), tuple(map(plain, value))
        if isinstance(value, set):
            return frozenset(value)
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
            return type(value), value
        if isinstance(value, type | types.BuiltinFunctionType):
            return value
        if isinstance(value, types.FunctionType) and not value.__closure__:
            return value.__code__, id(value.__globals__), plain(value.__defaults__), plain(value.__kwdefaults__)
        return "object", id(value)

    return type(module), plain(vars(module))


def make_task(module: Any, kind: Target | str, num_classes: int | None, example: Tensor, **options: Any) -> Task:
    """A task, after one forward pass that shows the model fits the data; raises `ValueError` in words if not.

    Whole numbers, such as the tokens of a text, go to the model as they are, unless it takes nothing but floats.
    """
    task = Task(module, kind, num_classes=num_classes, **options)
    example = _some_of(example)
    try:
        with torch.no_grad():
            try:
                out = task.logits(task.init(), example)
            except (RuntimeError, TypeError):
                if task.decode is not None or example.is_floating_point():
                    raise
                task = Task(module, kind, num_classes=num_classes, **{**options, "decode": as_floats})
                out = task.logits(task.init(), example)
    except Exception as error:
        if isinstance(error, IndexError) and not example.is_floating_point():
            raise ValueError(
                f"the model does not accept whole numbers from {int(example.min())} to {int(example.max())}, which the "
                f"inputs have ({error}): its table of embeddings may be too small"
            ) from error
        why = f"{error}{in_user_code(error)}"
        raise ValueError(f"the model does not accept inputs of shape {tuple(example.shape[1:])}: {why}") from error
    if (problem := task.target.problem(out)) is not None:
        raise ValueError(problem)
    if task.target.num_outputs is not None:
        try:
            task.output_losses(out, task.target.blank(len(out)).to(out.device))
        except Exception as error:
            raise ValueError(f"the loss cannot be computed: {error}{in_user_code(error)}") from error
    if task.augment is not None:
        _check_augmentation(task, example)
    task.head_is_last = _head_is_last(task, example, out)
    return task


@torch.no_grad()
def _check_augmentation(task: Task, x: Tensor) -> None:
    assert task.augment is not None
    x = task._decoded(x)
    try:
        changed = task.augment(x, torch.tensor(1))
    except Exception as error:
        raise ValueError(f"the augmentation does not accept these inputs: {error}{in_user_code(error)}") from error
    if not isinstance(changed, Tensor) or (changed.shape, changed.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"the augmentation must return inputs of the same type and shape, {tuple(x.shape)}, one by one"
        )


def _some_of(inputs: Tensor) -> Tensor:
    """Return two inputs; of whole numbers the smallest and the largest at every place, which tables may lack."""
    if inputs.is_floating_point() or inputs.dtype in (torch.uint8, torch.bool) or inputs.is_meta or len(inputs) < 2:
        return inputs[:2]
    return torch.stack([inputs.amin(0), inputs.amax(0)])


@torch.no_grad()
def _head_is_last(task: Task, x: Tensor, outputs: Tensor) -> bool:
    """Tell whether the model's outputs for `x` are what its head, one linear layer, makes of its features."""
    if task.head_module is None or not isinstance(task._eval.get_submodule(task.head_module), nn.Linear):
        return False
    alone = task.head(task.init(), task.features(task.init(), x))
    return alone.shape == outputs.shape and torch.allclose(alone, outputs, rtol=1e-4, atol=1e-5)
