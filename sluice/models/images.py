"""Convolutional nets for pixels and for scattering coefficients."""

from __future__ import annotations

from torch import nn

from sluice._base.errors import InputError
from sluice.models.activations import Activation, create_activation
from sluice.models.base import FeatureNet

SMALLEST_GREY_IMAGE = 16
SMALLEST_COLOUR_IMAGE = 8


class GreyPixelNet(FeatureNet):
    """Two convolutions and two linear layers for one-channel images: 26,010 parameters for 1x28x28 and 10 classes."""

    def __init__(self, *, height: int, width: int, classes: int, activation: Activation = "tanh") -> None:
        super().__init__()
        if min(height, width) < SMALLEST_GREY_IMAGE:
            raise InputError(
                f"images of {height}x{width} pixels are too small for this net: they must be at least "
                f"{SMALLEST_GREY_IMAGE}x{SMALLEST_GREY_IMAGE}. Use scattering-cnn or linear."
            )
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=8, stride=2, padding=2),
            create_activation(activation),
            nn.MaxPool2d(kernel_size=2, stride=1),
            nn.Conv2d(16, 32, kernel_size=4, stride=2),
            create_activation(activation),
            nn.MaxPool2d(kernel_size=2, stride=1),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(32 * _grey_side(height) * _grey_side(width), 32),
            create_activation(activation),
            nn.Linear(32, classes),
        )


class ColourPixelNet(FeatureNet):
    """Six convolutions in three blocks for three-channel images: 550,570 parameters for 3x32x32 and 10 classes."""

    def __init__(self, *, height: int, width: int, classes: int, activation: Activation = "tanh") -> None:
        super().__init__()
        if min(height, width) < SMALLEST_COLOUR_IMAGE:
            raise InputError(
                f"images of {height}x{width} pixels are too small for this net: they must be at least "
                f"{SMALLEST_COLOUR_IMAGE}x{SMALLEST_COLOUR_IMAGE}. Use scattering-cnn or linear."
            )
        layers: list[nn.Module] = []
        channels = 3
        for block_channels in (32, 64, 128):
            for _ in range(2):
                layers += [nn.Conv2d(channels, block_channels, kernel_size=3, padding=1), create_activation(activation)]
                channels = block_channels
            layers.append(nn.MaxPool2d(kernel_size=2))
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.classifier = nn.Sequential(
            nn.Linear(128 * (height // 8) * (width // 8), 128),
            create_activation(activation),
            nn.Linear(128, classes),
        )


class GreyScatteringNet(FeatureNet):
    """Two convolutions on the 81 coefficients of a one-channel image: 33,066 parameters for 81x7x7 and 10 classes."""

    def __init__(self, *, height: int, width: int, classes: int, activation: Activation = "tanh") -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(81, 16, kernel_size=3, stride=2, padding=1),
            create_activation(activation),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            create_activation(activation),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(32 * ((height + 1) // 2) * ((width + 1) // 2), 32),
            create_activation(activation),
            nn.Linear(32, classes),
        )


class ColourScatteringNet(FeatureNet):
    """Two convolutions on the 243 coefficients of a three-channel image: 187,210 parameters for 243x8x8, 10 classes."""

    def __init__(self, *, height: int, width: int, classes: int, activation: Activation = "tanh") -> None:
        super().__init__()
        if min(height, width) < 2:
            raise InputError(
                f"coefficients of {height}x{width} points are too few for this net: they must be at least 2x2, "
                "which is an image of 8x8 pixels. Use linear."
            )
        self.features = nn.Sequential(
            nn.Conv2d(243, 64, kernel_size=3, padding=1),
            create_activation(activation),
            nn.MaxPool2d(kernel_size=2),
            nn.Conv2d(64, 64, kernel_size=3, padding=1),
            create_activation(activation),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(64 * (height // 2) * (width // 2), classes)


def _grey_side(pixels: int) -> int:
    """What is left of a side after the two strided convolutions and the two poolings."""
    after_first_pool = (pixels - 4) // 2
    return (after_first_pool - 4) // 2
