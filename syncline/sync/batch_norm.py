"""What batch norm does across ranks.

    local       each rank normalises its shard by itself, and keeps running statistics of its own
    broadcast   the same, but rank 0's running statistics replace the others' before every forward
    sync        mean and variance are those of the global batch: the model computes what one worker would compute

Where nothing is said, ddp does what PyTorch does, broadcast; the other methods do local.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from syncline.comm.communicator import Communicator
from syncline.errors import PlanError
from syncline.sync.base import GradientSync
from syncline.sync.bucketed import Bucketed
from syncline.sync.ddp import DDP
from syncline.sync.single import Single
from syncline.sync.sync_batch_norm import Statistics, synchronise_batch_norm

Policy = Literal["local", "broadcast", "sync"]


def attach(sync: GradientSync, model: nn.Module, policy: Policy | None) -> nn.Module:
    """`sync.attach`, with batch norm by the policy; None leaves it to the method. Collective."""
    if isinstance(sync, Single):
        return sync.attach(model)  # perhaps alone, while other ranks wait
    if policy == "sync" and sync.communicator.world_size > 1:
        channel = sync.own_channel("batch norm")
        if isinstance(sync, DDP | Bucketed):
            refuse_shared_channel(sync.communicator, channel)
        if synchronise_batch_norm(model, Statistics(channel)) is not model:
            raise PlanError("a model that is a batch norm and nothing else cannot be synchronised.")
    module = sync.attach(model)
    if policy == "broadcast" and not isinstance(sync, DDP):  # which does so by itself
        sync.share_buffers(model)
    return module


def refuse_shared_channel(communicator: Communicator, channel: Communicator) -> None:
    """In a group that is not the whole world torch gives no second channel; statistics would mix with gradients."""
    group = getattr(communicator.backend, "group", None)
    if group is not None and getattr(channel.backend, "group", None) is group:
        raise PlanError(
            "statistics over all ranks' batches need a channel beside that of gradients sent during backward, "
            "and torch gives a subgroup only one.",
            action="Take method all-reduce or shared-memory, or the whole world.",
        )
