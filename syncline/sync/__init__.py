"""Stage 4b: when gradients are averaged: one file per method."""

from __future__ import annotations

from syncline.comm.communicator import Communicator
from syncline.spans import EventLog
from syncline.sync.all_reduce import AllReduce
from syncline.sync.base import GradientSync
from syncline.sync.ddp import DDP
from syncline.sync.gather_scatter import GatherScatter
from syncline.sync.point_to_point import PointToPoint
from syncline.sync.single import Single

__all__ = ["CLASSES", "GradientSync", "make_sync"]

CLASSES: dict[str, type[GradientSync]] = {
    "single": Single,
    "gather-scatter": GatherScatter,
    "point-to-point": PointToPoint,
    "all-reduce": AllReduce,
    "ddp": DDP,
}


def make_sync(
    method: str,
    communicator: Communicator,
    *,
    log: EventLog | None = None,
    bucket_cap_mb: float | None = None,
) -> GradientSync:
    """The method by the name that users type."""
    if method == "ddp":
        return DDP(communicator, log=log, bucket_cap_mb=bucket_cap_mb)
    return CLASSES[method](communicator)
