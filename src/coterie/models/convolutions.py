"""The papers' small convolutional networks. Each takes the shape of one image and the number of outputs."""

from __future__ import annotations

from torch import nn


def cnn(shape: tuple[int, ...], outputs: int, *, features: int = 512) -> nn.Module:
    """pFedVMP's network: two 5x5 convolutions (32 and 64 channels) with max pooling, 512 features, a linear head.

    See its Table 4; `features` is the feature width of its Table 6.
    """
    channels, height, width = check_image(shape, 16)
    high, wide = (((size - 4) // 2 - 4) // 2 for size in (height, width))
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 5), nn.LeakyReLU(0.1), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.LeakyReLU(0.1), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * high * wide, features), nn.LeakyReLU(0.1)),
        nn.Linear(features, outputs),
    )


def cnn_bn(shape: tuple[int, ...], outputs: int, *, features: int = 512, dropout: float = 0.5) -> nn.Module:
    """FedMAP's network for FEMNIST: four 3x3 convolutions with BatchNorm, 512 features, dropout, a linear head.

    See its Table 7.
    """
    channels, height, width = check_image(shape, 4)
    return nn.Sequential(
        *_convolution_bn(channels, 32),
        *(*_convolution_bn(32, 64), nn.MaxPool2d(2)),
        *_convolution_bn(64, 64),
        *(*_convolution_bn(64, 128), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128 * (height // 4) * (width // 4), features), nn.BatchNorm1d(features)),
        *(nn.ReLU(), nn.Dropout(dropout)),
        nn.Linear(features, outputs),
    )


def _convolution_bn(before: int, after: int) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]


def cnn2(shape: tuple[int, ...], outputs: int, *, channels: int = 128, padding: int = 0) -> nn.Module:
    """FedeRiCo's CNN2 for CIFAR-10: three 3x3 convolutions of 128 channels with max pooling and ReLU, a linear head.

    See its appendix D, which does not mention padding: there is none by default.
    """
    depth, height, width = check_image(shape, 22 - 14 * min(padding, 1))
    layers: list[nn.Module] = []
    for before in (depth, channels, channels):
        layers += [nn.Conv2d(before, channels, 3, padding=padding), nn.MaxPool2d(2), nn.ReLU()]
        height, width = ((size + 2 * padding - 2) // 2 for size in (height, width))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * width, outputs))


def lenet(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """pFedBreD's network for CIFAR-10, LeNet-like: two 5x5 convolutions (6 and 16 channels), 120-84-out, ReLU."""
    channels, height, width = check_image(shape, 16)
    high, wide = (((size - 4) // 2 - 4) // 2 for size in (height, width))
    return nn.Sequential(
        *(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * high * wide, 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU()),
        nn.Linear(84, outputs),
    )


def check_image(shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    """Return (channels, height, width); raise `ValueError` unless `shape` is an image with `least` pixels a side."""
    if len(shape) != 3 or min(shape[1:]) < least:
        raise ValueError(
            f"this network needs images of at least {least} x {least} pixels as (channels, height, width), not {shape}"
        )
    return shape[0], shape[1], shape[2]
