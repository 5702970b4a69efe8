"""Stage 4b: when gradients are averaged: one file per method, its row in `syncline/methods.py`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from syncline.comm.communicator import Communicator
from syncline.comm.mpi_backend import MpiCommunicator
from syncline.comm.threads import ThreadCommunicator
from syncline.errors import PlanError
from syncline.methods import METHODS, BatchNorm, current_name
from syncline.spans import EventLog
from syncline.sync.base import GradientSync

__all__ = ["GradientSync", "make_sync"]


def make_sync(
    method: str,
    communicator: Communicator,
    *,
    log: EventLog | None = None,
    batch_norm: BatchNorm | None = None,
    **options: Any,
) -> GradientSync:
    """The method by the name that users type, with its options. Collective.

    What batch norm does is for `batch_norm.attach`; only a method that broadcasts buffers by itself must know it
    when it is made.
    """
    row = METHODS[current_name(method)]
    if row.world == "mpiexec" and not isinstance(communicator.backend, MpiCommunicator | ThreadCommunicator):
        raise PlanError(
            f"method {row.name} needs ranks that mpiexec started.",
            action=f"Use `syncline train --method {row.name}`, or `mpiexec -n N python -m syncline.worker PLAN`; "
            "with torch's ranks, use method bucketed.",
        )
    arguments = {**row.presets, **options}
    if row.broadcasts_buffers and batch_norm is not None:
        arguments["broadcast_buffers"] = batch_norm == "broadcast"
    module, _, name = row.made_by.partition(":")
    make: type[GradientSync] = getattr(import_module(module), name)
    sync = make(communicator, **arguments)
    if log is not None:
        sync.log = log
    return sync
