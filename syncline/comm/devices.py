"""Which backends a world needs, and which GPU a rank uses: rules without a look at the machine, so that tests can ask
them about machines that have GPUs. None of this has been run on one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from syncline.errors import PlanError

ON_CPU = "gloo"
ON_BOTH = "cpu:gloo,cuda:nccl"
"""Each tensor is sent by the backend of the device that it is on, so the model decides."""


@dataclass(frozen=True)
class Choice:
    backend: str
    gpu: int | None = None
    """To be made the current one, as NCCL wants it; None leaves all GPUs alone."""


def choose(model: Iterable[torch.device], *, gpus: int, nccl: bool, local_rank: int) -> Choice:
    """For a world that is about to be joined. `model`: where its parameters are; nothing if there is none yet.

    A model on the CPU touches no GPU. Without a model, a rank's GPU is the one with its local number.
    """
    if not gpus or not nccl:
        return Choice(ON_CPU)
    devices = set(model)
    on_gpu = sorted(local_rank if device.index is None else device.index for device in devices if is_gpu(device))
    if on_gpu:
        return Choice(ON_BOTH, on_gpu[0])
    return Choice(ON_BOTH, local_rank if not devices and local_rank < gpus else None)


def check(backends: str, model: Iterable[torch.device]) -> None:
    """Refuse a group that cannot send what the model has. `backends`: as torch writes them, 'cpu:gloo,cuda:nccl'."""
    served = {part.partition(":")[0] for part in backends.split(",")}
    for device in sorted({device.type for device in model} & {"cpu", "cuda"}):
        if device not in served:
            raise PlanError(
                f"the model is on {device}, but the process group has no backend for that ({backends}).",
                action=f'Use init_process_group("{ON_BOTH}"), or move the model.',
            )


def for_small_messages(backends: str, gpu: int) -> torch.device:
    """Where flags and numbers between ranks are put: on the CPU if the group can send from there."""
    return torch.device("cpu") if "cpu:" in backends else torch.device("cuda", gpu)


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"
