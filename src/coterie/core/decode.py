"""Decoding images: they stay uint8 in memory and become float32 where a minibatch enters the model.

decode(x)_c = (x_c / 255 - mean_c) / std_c          for channel c; x [batch, channels, ...]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.core.errors import DataError


@dataclass(frozen=True)
class Decode:
    """The scaling of images: a mean and a standard deviation for each channel, or one of each for all channels.

    They are Python numbers and not tensors, so that a compiled step contains them as constants.

    Raises:
        DataError: if there are not as many means as standard deviations, or a standard deviation is not above 0.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean or not all(value > 0 for value in self.std):
            raise DataError(f"scaling needs as many means as standard deviations, above 0, not {self.mean}, {self.std}")

    def __call__(self, x: Tensor) -> Tensor:
        """Decode images [batch, channels, ...]; tensors that are not uint8 pass through as already decoded.

        Raises:
            DataError: if the images do not have as many channels as there are means.
        """
        if x.dtype != torch.uint8:
            return x
        unit = x.to(torch.float32) / 255
        if len(self.mean) == 1:
            return unit if self == UNIT else (unit - self.mean[0]) / self.std[0]
        if unit.ndim < 2 or unit.shape[1] != len(self.mean):
            raise DataError(f"scaling for {len(self.mean)} channels does not fit images of shape {tuple(x.shape[1:])}")
        scaled = [(unit[:, c] - mean) / std for c, (mean, std) in enumerate(zip(self.mean, self.std, strict=True))]
        return torch.stack(scaled, 1)

    def to_json(self) -> dict[str, Any]:
        """Return `{"mean": [...], "std": [...]}`."""
        return {key: list(value) for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, value: Any) -> Decode | None:
        """Invert `to_json`; None, for data without images, stays None."""
        return None if value is None else cls(tuple(map(float, value["mean"])), tuple(map(float, value["std"])))


def as_floats(x: Tensor) -> Tensor:
    """Turn whole numbers into floats, for a model that takes no whole numbers."""
    return x.to(torch.float32)


Decoder = Decode | Callable[[Tensor], Tensor]  # what stands between the examples as they are kept and a model
UNIT = Decode()  # to [0, 1]
IMAGENET = Decode((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
