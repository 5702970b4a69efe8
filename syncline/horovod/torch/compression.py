"""What is done to a tensor before it travels, and undone after. Scripts write their own in this form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """What a compressor has."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor to send, and whatever `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        raise NotImplementedError


class NoneCompressor(Compressor):
    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Floating-point values travel with 16 bits."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor.to(torch.float16) if tensor.is_floating_point() else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


class Compression:
    """What scripts choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
