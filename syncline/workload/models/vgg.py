"""VGG networks (Simonyan and Zisserman 2014)."""

from __future__ import annotations

from torch import Tensor, nn

from syncline.workload.models.basics import start_weights

VGG11_CHANNELS = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


class VGG11(nn.Module):
    """VGG-11 for 32x32 images: eight 3x3 convolutions with batch norm, one linear layer; 9,231,114 parameters."""

    def __init__(self, num_classes: int = 10, *, narrower: int = 1) -> None:
        """With every layer `narrower` times narrower than VGG-11's."""
        super().__init__()
        self.features = nn.Sequential(*_vgg_layers(narrower))
        self.classifier = nn.Linear(512 // narrower, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.features(images)
        if features.shape[-2:] != (1, 1):  # images larger than 32x32
            features = features.mean((2, 3))
        logits: Tensor = self.classifier(features.flatten(1))
        return logits


def vgg11_quarter(num_classes: int = 10) -> nn.Module:
    """VGG-11 with a quarter of the channels, 579,786 parameters: for studies of many runs."""
    return VGG11(num_classes, narrower=4)


def _vgg_layers(narrower: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    channels = 3
    for item in VGG11_CHANNELS:
        if isinstance(item, int):
            width = item // narrower
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    return layers


VGG16_CHANNELS = (64, 64, "pool", 128, 128, "pool", *(256,) * 3, "pool", *(512,) * 3, "pool", *(512,) * 3, "pool")


class VGG16(nn.Module):
    """VGG-16 for ImageNet, configuration D of the paper: no batch norm, three linear layers; 138,357,544 parameters.

    Images of another size than 224x224 are pooled to the 7x7 positions that the linear layers take.
    """

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for item in VGG16_CHANNELS:
            if isinstance(item, int):
                layers += [nn.Conv2d(channels, item, 3, padding=1), nn.ReLU(inplace=True)]
                channels = item
            else:
                layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7))
        self.classifier = nn.Sequential(
            *(nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout()),
            *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout()),
            nn.Linear(4096, num_classes),
        )
        start_weights(self)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits
