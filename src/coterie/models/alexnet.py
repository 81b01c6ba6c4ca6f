"""AlexNet with BatchNorm, as in FedBN."""

from __future__ import annotations

from torch import nn

from coterie.models.convolutions import check_image


def alexnet_bn(shape: tuple[int, ...], outputs: int, *, width: int = 4096) -> nn.Module:
    """FedBN's AlexNet with BatchNorm, for Office-31 at 224x224 (FedMAP's Table 4).

    `width` is that of the last two hidden layers.
    """
    channels, *_ = check_image(shape, 63)
    return nn.Sequential(
        *_block(nn.Conv2d(channels, 64, 11, stride=4, padding=2), pool=True),
        *_block(nn.Conv2d(64, 192, 5, padding=2), pool=True),
        *_block(nn.Conv2d(192, 384, 3, padding=1)),
        *_block(nn.Conv2d(384, 256, 3, padding=1)),
        *_block(nn.Conv2d(256, 256, 3, padding=1), pool=True),
        *(nn.AdaptiveAvgPool2d((6, 6)), nn.Flatten()),
        *(nn.Linear(256 * 6 * 6, width), nn.BatchNorm1d(width), nn.ReLU()),
        *(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()),
        nn.Linear(width, outputs),
    )


def _block(convolution: nn.Conv2d, *, pool: bool = False) -> list[nn.Module]:
    layers = [convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU()]
    return [*layers, nn.MaxPool2d(3, stride=2)] if pool else layers
