"""`import syncline.horovod.torch as hvd`: the names of Horovod's torch API."""

from syncline.horovod.common.exceptions import HorovodInternalError
from syncline.horovod.torch import elastic
from syncline.horovod.torch.compression import Compression
from syncline.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from syncline.horovod.torch.mpi_ops import *  # noqa: F403
from syncline.horovod.torch.mpi_ops import __all__ as _operations
from syncline.horovod.torch.optimizer import DistributedOptimizer
from syncline.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression", "DistributedOptimizer", "HorovodInternalError", "SyncBatchNorm", "allgather_object",
    "broadcast_object", "broadcast_object_fn", "broadcast_optimizer_state", "broadcast_parameters", "elastic",
    *_operations,
]  # fmt: skip
