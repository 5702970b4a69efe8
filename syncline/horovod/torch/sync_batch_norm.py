"""SyncBatchNorm: batch norm over all ranks' batches. Horovod's takes GPU tensors only; this one works on CPU too."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from syncline.horovod.torch.asynchronous import allgather_async, synchronize
from syncline.sync import batch_norm


class _Statistics:
    """What ranks tell each other, by calls of the slow lane."""

    counted = True
    weight = 1.0

    def gather(self, own: Tensor, what: str) -> Tensor:
        gathered: Tensor = synchronize(allgather_async(own.unsqueeze(0)))
        return gathered


class SyncBatchNorm(batch_norm.SyncBatchNorm):
    """As `torch.nn.BatchNorm2d` and its relatives, with the statistics of all ranks' batches in training."""

    statistics = _Statistics()  # type: ignore[assignment]
    label = "SyncBatchNorm"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Module.__reduce_ex__(self, protocol)
