"""ResNet-18 for small images."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from coterie.models.convolutions import check_image


def resnet18(shape: tuple[int, ...], outputs: int, *, width: int = 64) -> nn.Module:
    """ResNet-18 for 32x32 images (FedeRiCo's for CIFAR-100): a 3x3 stem, no pooling, four stages of two blocks.

    `width` is the number of channels of the first stage; each further stage has twice as many on half the pixels.
    """
    channels, *_ = check_image(shape, 8)
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    before = width
    for stage in range(4):
        after = width * 2**stage
        layers += [Block(before, after, 1 if stage == 0 else 2), Block(after, after, 1)]
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, outputs))


class Block(nn.Module):
    """Computes relu(bn(conv(relu(bn(conv(x))))) + x); a 1x1 convolution projects x if its shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.short(x))
