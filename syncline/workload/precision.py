"""The precision of compute: torch.autocast around forward, and so around its backward.

With bf16, matrix products and convolutions multiply 16-bit numbers. Weights, gradients, their sums and batch-norm
statistics stay in 32 bits, and the loss is computed from outputs that were widened to 32 bits.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from syncline.plan import Precision


def forward_in(precision: Precision, module: nn.Module, inputs: Tensor) -> Any:
    """The module's outputs. In float32 nothing is changed, not even an autocast that a caller has entered."""
    if precision == "float32":
        return module(inputs)
    with torch.autocast(inputs.device.type, torch.bfloat16):
        outputs = module(inputs)
    return widened(outputs)


def widened(outputs: Any) -> Any:
    """16-bit tensors in 32 bits: by themselves, in tuples, lists and dicts, or as the logits of an object."""
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
    if isinstance(outputs, tuple | list):
        parts = [widened(part) for part in outputs]
        return outputs._make(parts) if hasattr(outputs, "_make") else type(outputs)(parts)
    if type(outputs) is dict:
        return {key: widened(value) for key, value in outputs.items()}
    if isinstance(getattr(outputs, "logits", None), Tensor):
        outputs = copy.copy(outputs)
        outputs.logits = widened(outputs.logits)
    return outputs
