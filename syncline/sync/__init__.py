"""Stage 4b: when gradients are averaged: one file per method."""

from __future__ import annotations

from typing import Any

from syncline.comm.communicator import Communicator
from syncline.comm.mpi_backend import MpiCommunicator
from syncline.comm.threads import ThreadCommunicator
from syncline.errors import PlanError
from syncline.spans import EventLog
from syncline.sync.all_reduce import AllReduce
from syncline.sync.base import GradientSync
from syncline.sync.batch_norm import Policy
from syncline.sync.bucketed import Bucketed
from syncline.sync.ddp import DDP
from syncline.sync.gather_scatter import GatherScatter
from syncline.sync.hierarchical import Hierarchical
from syncline.sync.point_to_point import PointToPoint
from syncline.sync.replicas import Replicated
from syncline.sync.shared_memory import SharedMemory
from syncline.sync.single import Single

__all__ = ["CLASSES", "GradientSync", "make_sync"]

CLASSES: dict[str, type[GradientSync]] = {
    "single": Single,
    "gather-scatter": GatherScatter,
    "point-to-point": PointToPoint,
    "all-reduce": AllReduce,
    "ddp": DDP,
    "bucketed": Bucketed,
    "shared-memory": SharedMemory,
    "hierarchical": Hierarchical,
    "data-parallel": Replicated,
    "ring": Bucketed,
    "tree": Bucketed,
    "halving-doubling": Bucketed,
    "mpi": Bucketed,
}

PRESETS: dict[str, dict[str, Any]] = {
    "ring": {"collective": "ring"},
    "tree": {"collective": "tree"},
    "halving-doubling": {"collective": "halving-doubling"},
    "mpi": {"overlap": False},  # MPI makes progress only inside its calls
}
"""What a name stands for besides its class."""


def make_sync(
    method: str,
    communicator: Communicator,
    *,
    log: EventLog | None = None,
    batch_norm: Policy | None = None,
    **options: Any,
) -> GradientSync:
    """The method by the name that users type, with its options. Collective.

    What batch norm does is for `batch_norm.attach`; only ddp must know when it is made.
    """
    if method == "mpi" and not isinstance(communicator.backend, MpiCommunicator | ThreadCommunicator):
        raise PlanError(
            "method mpi needs ranks that mpiexec started, and these were started otherwise.",
            action="Use `syncline train --method mpi`, or `mpiexec -n N python -m syncline.worker PLAN`; "
            "among ranks of torch, take method bucketed.",
        )
    given = {**PRESETS.get(method, {}), **options}
    if method in ("ddp", "shared-memory", "hierarchical"):
        given["log"] = log  # their transfers do not pass the communicator
    if method == "ddp" and batch_norm is not None:
        given["broadcast_buffers"] = batch_norm == "broadcast"
    sync = CLASSES[method](communicator, **given)
    if log is not None:
        sync.log = log
    return sync
