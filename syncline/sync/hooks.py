"""torch's communication hooks on our buckets: the object that a hook is given, and the call.

torch's own GradBucket can only be made by its C++ reducer, so this one offers the same methods.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncline.errors import PlanError

CommHook = Callable[[Any, Any], torch.futures.Future[Tensor]]


@dataclass(frozen=True)
class HookBucket:
    """What a hook sees of a bucket. A gradient that a cut goes through appears as flat pieces."""

    number: int
    values: Tensor
    last: bool
    pieces: list[tuple[Tensor, Tensor]]
    """(parameter, its gradient or the piece of it that is in this bucket)."""

    def index(self) -> int:
        return self.number

    def buffer(self) -> Tensor:
        return self.values

    def gradients(self) -> list[Tensor]:
        return [gradient for _, gradient in self.pieces]

    def parameters(self) -> list[Tensor]:
        return [parameter for parameter, _ in self.pieces]

    def is_last(self) -> bool:
        return self.last

    def set_buffer(self, values: Tensor) -> None:
        self.values.copy_(values)


def apply_hook(state: object, hook: CommHook, bucket: HookBucket) -> None:
    """Run the hook and put its result, which is the mean, into the bucket."""
    future: Any = hook(state, bucket)
    if not isinstance(future, torch._C.Future):
        raise PlanError(f"callback must return a torch.futures.Future object, but got {type(future).__name__}.")
    result: Any = future.wait()
    result = result[0] if isinstance(result, list) else result
    if result.data_ptr() != bucket.values.data_ptr():
        bucket.values.copy_(result.view_as(bucket.values))
