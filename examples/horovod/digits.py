"""Made-up digits for the scripts beside this file: ten patterns of 12 x 12 points, with noise."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


def digits(count, seed):
    patterns = torch.randn(10, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=random)
    return TensorDataset(patterns[labels] + 0.8 * torch.randn(count, 1, 12, 12, generator=random), labels)


def network():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(200, 10)
    )
