"""Make a task of a model, and check in words that the model suits the data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from coterie.core.decode import as_floats
from coterie.core.targets import Target
from coterie.core.task import Task
from coterie.core.user_code import in_user_code


def make_task(module: Any, kind: Target | str, num_classes: int | None, example: Tensor, **options: Any) -> Task:
    """Make a task, after one forward pass that shows that the model fits the data.

    Whole numbers, such as the tokens of a text, go to the model as they are, unless it takes nothing but floats.

    Args:
        module: the model.
        kind: what is predicted: a target, "classification" or "regression".
        num_classes: the number of classes, if `kind` is "classification".
        example: some inputs, [batch, ...].
        options: further arguments of `Task`.

    Raises:
        ValueError: the model, its loss or the augmentation does not fit; the message says why.
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
    """Raise `ValueError` unless the augmentation keeps the type and shape of inputs."""
    assert task.augment is not None
    x = task.decoded(x)
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
    if task.head_module is None or not isinstance(task.head_layer, nn.Linear):
        return False
    alone = task.head(task.init(), task.features(task.init(), x))
    return alone.shape == outputs.shape and torch.allclose(alone, outputs, rtol=1e-4, atol=1e-5)
