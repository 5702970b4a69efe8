"""Models whose gradients tests know: whole numbers, where sums are exact, and floats."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from helpers import gradients, integer_loss, integer_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

TINY = 1e-4
"""MB: buckets of 100 bytes, so that small models have many and large parameters are split."""
FLAT = ["bucketed", "shared-memory", "halving-doubling"]
"""Methods that work on flat buffers, one of each kind."""


class Weights(nn.Module):
    """Parameters whose gradients are whatever factors the loss multiplies them with."""

    def __init__(self, *kinds: tuple[tuple[int, ...], torch.dtype]) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in kinds)

    def forward(self, rank: int, turn: int) -> Tensor:
        """Gradients are multiples of 12 up to 36: exact, and so is their mean, in bfloat16 too."""
        stream = torch.Generator().manual_seed(100 * turn + rank)
        factors = [12 * torch.randint(-3, 4, weight.shape, generator=stream) for weight in self.all]
        products = [(weight * factor).sum() for weight, factor in zip(self.all, factors, strict=True)]
        return torch.stack([product.double() for product in products]).sum()


def one_dtype(dtype: torch.dtype) -> Callable[[], Weights]:
    return lambda: Weights(((7, 5), dtype), ((3,), dtype), ((), dtype), ((0, 2), dtype))


def mixed_dtypes() -> Weights:
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
    return Weights(*[((4, 3), dtype) for dtype in dtypes], *[((5,), dtype) for dtype in dtypes])


def huge_and_tiny() -> Weights:
    f32 = torch.float32
    return Weights(*[((2,), f32)] * 20, ((50, 6), f32), *[((1,), f32)] * 20)


WEIGHTS: dict[str, Callable[[], Weights]] = {
    "float16": one_dtype(torch.float16),
    "bfloat16": one_dtype(torch.bfloat16),
    "float64": one_dtype(torch.float64),
    "mixed dtypes": mixed_dtypes,
    "one huge and many tiny": huge_and_tiny,
}
NETWORKS = ["tied", "frozen", "channels-last"]


def make(name: str) -> nn.Module:
    return WEIGHTS[name]() if name in WEIGHTS else integer_model(name)


def loss_of(name: str, module: nn.Module, rank: int, turn: int) -> Tensor:
    loss: Tensor = module(rank, turn) if name in WEIGHTS else integer_loss(module, rank, turn)
    return loss


def mean_one_after_the_other(name: str, world_size: int, turn: int) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    for rank in range(world_size):
        model = make(name)
        loss_of(name, model, rank, turn).backward()
        for key, gradient in gradients(model).items():
            sums[key] = sums.get(key, 0) + gradient.double()
    assert all(torch.equal(total, total.round()) for total in sums.values())
    return {key: total / world_size for key, total in sums.items()}


def small_vgg() -> nn.Module:
    """VGG-like: convolutions with batch norm and pooling, channels last, at a fraction of the size."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 32, 64):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def cnn_without_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(72, 10))


FLOAT_MODELS = {"vgg": small_vgg, "cnn without batch norm": cnn_without_batch_norm}


@cache
def float_template(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return FLOAT_MODELS[name]()


def float_loss(module: nn.Module, rank: int) -> Tensor:
    stream = torch.Generator().manual_seed(rank)
    images = torch.randn(4, 3, 8, 8, generator=stream).contiguous(memory_format=torch.channels_last)
    return cross_entropy(module(images), torch.randint(10, (4,), generator=stream))


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
