"""What the keywords of torch's DistributedDataParallel mean here: read, or refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_map_only

from syncline.errors import PlanError
from syncline.methods import BatchNorm
from syncline.sync.base import SameStart

Device = int | torch.device
REFUSED = {
    "mixed_precision": "use autocast for 16-bit compute, and transfer_dtype for 16-bit transfers",
}
"""Keywords that are not supported, and what to do instead."""


def refuse(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """What is left of the keywords without those that are refused by name; None is torch's default."""
    for name in keywords.keys() & REFUSED.keys():
        if keywords[name] is not None:
            raise PlanError(f"DataParallel does not accept {name}: {REFUSED[name]}.")
    return {name: value for name, value in keywords.items() if name not in REFUSED}


def method_and_devices(
    method: str | Sequence[Device] | None, device_ids: Sequence[Device] | None
) -> tuple[str, Sequence[Device] | None]:
    """The second place is the method's here and device_ids' in torch: a list or None there is the latter."""
    if isinstance(method, str):
        return method, device_ids
    return "auto", device_ids if method is None else method


def batch_norm_of(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> BatchNorm:
    """The second is what newer versions of torch call the first."""
    shares = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
    return "local" if shares is False else "broadcast"


def same_start(init_sync: bool, broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> SameStart:
    """Only the older name of the two holds for the start as well."""
    if not init_sync:
        return "nothing"
    return "parameters" if broadcast_buffers is False and forward_sync_buffers is None else "all"


def check_delayed(named: Sequence[tuple[str, nn.Parameter]] | None, hooked: nn.Parameter | None) -> None:
    """When exactly a gradient travels is the method's business: these are averaged with all others."""
    if (named is None) != (hooked is None):
        raise PlanError("delay_all_reduce_named_params and param_to_hook_all_reduce go together: give both or none.")


def check_parameters(module: nn.Module) -> None:
    parameters = list(module.parameters())
    if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
        raise PlanError(
            "Modules with uninitialized parameters cannot be wrapped.", action="Run one forward before you wrap it."
        )
    if not any(parameter.requires_grad for parameter in parameters):
        raise PlanError(
            "the module has no parameter that requires a gradient, so there is nothing to average.",
            action="Call the module itself.",
        )


def one_device(
    module: nn.Module, device_ids: Sequence[Device] | None, output_device: Device | None
) -> tuple[list[int] | None, int | None]:
    """torch's `device_ids` and `output_device`, which can only say where the module is already; None on a CPU."""
    if device_ids is not None and len(device_ids) > 1:
        raise PlanError("DataParallel uses one device per process.", action="Start one process per device.")
    kind = next(module.parameters()).device.type
    if kind == "cpu":
        return None, None
    given = [torch.device(kind, where) if isinstance(where, int) else where for where in device_ids or ()]
    own = next(module.parameters()).device
    outputs = torch.device(kind, output_device) if isinstance(output_device, int) else output_device
    for name, device in [("device_ids", device) for device in given] + [("output_device", outputs)]:
        if device is not None and device != own:
            raise PlanError(
                f"{name} says {device}, but the module is on {own}.",
                action="Move the module there before wrapping it.",
            )
    return ([own.index] if given else None), (own.index if given or outputs is not None else None)


def on_device(inputs: Any, device: torch.device) -> Any:
    """With device_ids, torch's class moves inputs to the device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), inputs)


def names_to_ignore(module: nn.Module) -> set[str]:
    """As torch's `_set_params_and_buffers_to_ignore_for_model` left them; the module's own may begin with a dot."""
    return {name.removeprefix(".") for name in getattr(module, "_ddp_params_and_buffers_to_ignore", ())}


def group_of(
    process_group: dist.ProcessGroup | None, device_mesh: dist.DeviceMesh | None
) -> dist.ProcessGroup | None:
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise PlanError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh.ndim != 1:
        raise PlanError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    return device_mesh.get_group(mesh_dim=0)


def check_comm_hook(hook: object) -> None:
    """As torch's class does; annotations that are text are left alone."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    if bucket is not None and not _is_one_of(bucket.annotation, dist.GradBucket, Any):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    if not _is_one_of(signature.return_annotation, torch.futures.Future[Tensor], Any):
        raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")


def _is_one_of(annotation: Any, *wanted: Any) -> bool:
    return isinstance(annotation, str) or annotation in (inspect.Parameter.empty, *wanted)
