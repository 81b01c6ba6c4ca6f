"""Random changes of images in training: functions (x, key) -> x that are pure, so that every engine draws the same.

    flip[:CHANCE]       mirror left and right, with chance 0.5
    crop[:PIXELS]       pad by so many pixels, repeating the edge, and cut the old size out anywhere: a shift by up to 4
    rotate[:DEGREES]    turn about the centre by up to 10 degrees either way, bilinearly, repeating the edge
    brightness[:SHARE]  multiply by 1 + u, u uniform within 0.2 either way
    contrast[:SHARE]    the same of the distance to the image's mean
    noise[:DEVIATION]   add normal noise of deviation 0.1 to every pixel

`flip,crop:4` is both, one after the other. Numbers come from a hash of the minibatch's key and an example's place in it
(`coterie.core.dropout.uniform`), so no stacking, no worker and no interruption changes them. x is a minibatch
[batch, channels, height, width] as the model sees it: floats, scaled. `Task` calls this in training steps only.

Your own is a function of the same two arguments, given from Python or as `package.module:function`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import rng
from coterie.core.dropout import uniform
from coterie.core.errors import ConfigError
from coterie.core.extensions import with_options
from coterie.core.task import Augment


@dataclass(frozen=True)
class Flip:
    chance: float = 0.5

    def __call__(self, x: Tensor, key: Tensor) -> Tensor:
        return torch.where(_each(x, key) < self.chance, x.flip(3), x)


@dataclass(frozen=True)
class Crop:
    pixels: float = 4

    def __call__(self, x: Tensor, key: Tensor) -> Tensor:
        for axis in (2, 3):
            shift = (_each(x, key + axis) * (2 * self.pixels + 1)).floor().long() - int(self.pixels)
            size = x.shape[axis]
            line = torch.arange(size, device=x.device).view([-1 if i == axis else 1 for i in range(4)])
            x = x.gather(axis, (line + shift).clamp(0, size - 1).expand(x.shape))
        return x


@dataclass(frozen=True)
class Rotate:
    degrees: float = 10

    def __call__(self, x: Tensor, key: Tensor) -> Tensor:
        angle = (2 * _each(x, key)[:, 0] - 1) * math.radians(self.degrees)  # [batch, 1, 1]
        height, width = x.shape[2:]
        down, across = (torch.arange(side, device=x.device) - (side - 1) / 2 for side in (height, width))
        cos, sin, down = angle.cos(), angle.sin(), down[:, None]
        # Where each pixel comes from: -1 to 1 along both sides, whatever their lengths.
        place = (cos * across - sin * down) * (2 / width), (sin * across + cos * down) * (2 / height)
        return F.grid_sample(x, torch.stack(place, 3), padding_mode="border", align_corners=False)


@dataclass(frozen=True)
class Brightness:
    share: float = 0.2

    def __call__(self, x: Tensor, key: Tensor) -> Tensor:
        return x * _about_one(x, key, self.share)


@dataclass(frozen=True)
class Contrast:
    share: float = 0.2

    def __call__(self, x: Tensor, key: Tensor) -> Tensor:
        mean = x.mean((1, 2, 3), keepdim=True)
        return mean + (x - mean) * _about_one(x, key, self.share)


@dataclass(frozen=True)
class Noise:
    deviation: float = 0.1

    def __call__(self, x: Tensor, key: Tensor) -> Tensor:
        return x + self.deviation * rng.normals(key, {"": x})[""]


@dataclass(frozen=True)
class Several:
    """One after the other, each with a key of its own."""

    parts: tuple[Augment, ...]

    def __call__(self, x: Tensor, key: Tensor) -> Tensor:
        for number, part in enumerate(self.parts):
            x = part(x, key + number * rng.KEY_STEP)
        return x


AUGMENTATIONS: dict[str, Callable[..., Augment]] = {
    "flip": Flip,
    "crop": Crop,
    "rotate": Rotate,
    "brightness": Brightness,
    "contrast": Contrast,
    "noise": Noise,
}


def find_augmentation(text: str) -> Augment:
    """Build what text such as `flip,crop:4` or `package.module:function` names.

    Raises:
        ConfigError: there is no such augmentation, or its number is not one.
    """
    problems, parts = [], list[Augment]()
    for part in (each.strip() for each in text.split(",")):
        try:
            parts.append(_one(part))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return parts[0] if len(parts) == 1 else Several(tuple(parts))


def _one(text: str) -> Augment:
    found, words = with_options("augmentation", text, AUGMENTATIONS)
    made: Any = found
    if made not in AUGMENTATIONS.values():
        if words:
            raise ConfigError([f"augment = '{text}': a function of your own has no options"])
        return made  # type: ignore[no-any-return]
    try:
        (key,) = made.__dataclass_fields__
        (number,) = [float(word.removeprefix(f"{key}=")) for word in words] if words else (None,)
        if number is not None and not 0 <= number < math.inf:
            raise ValueError
    except ValueError:
        name = text.partition(":")[0]
        raise ConfigError([f"augment = '{text}': give one number, as in {name}:1 or {name}:{key}=1"]) from None
    return found() if number is None else found(number)


def _each(x: Tensor, key: Tensor) -> Tensor:
    """Return a number in [0, 1) for every example, [batch, 1, 1, 1]."""
    if x.ndim != 4:
        raise ValueError(f"an augmentation of images (channels, height, width) cannot take {tuple(x.shape[1:])}")
    return uniform(key, (len(x), 1, 1, 1)).to(x.dtype)


def _about_one(x: Tensor, key: Tensor, share: float) -> Tensor:
    return 1 + share * (2 * _each(x, key) - 1)
