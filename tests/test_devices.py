"""Backends and GPUs, asked about machines that have GPUs; and that no GPU is touched for a model on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import syncline
from syncline.comm import devices
from syncline.errors import PlanError

CPU, SECOND = torch.device("cpu"), torch.device("cuda", 1)
BOTH = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("model", "gpus", "nccl", "local_rank", "expected"),
    [
        ([CPU], 0, False, 1, ("gloo", None)),
        ([], 0, False, 1, ("gloo", None)),
        ([CPU], 4, True, 1, (BOTH, None)),
        ([CPU], 4, False, 1, ("gloo", None)),
        ([SECOND], 4, True, 0, (BOTH, 1)),
        ([CPU, SECOND], 4, True, 0, (BOTH, 1)),
        ([torch.device("cuda")], 4, True, 3, (BOTH, 3)),
        ([], 4, True, 2, (BOTH, 2)),
        ([], 4, True, 6, (BOTH, None)),
    ],
    ids=[
        "no GPU", "no GPU, no model", "model on the CPU", "torch without NCCL", "model on a GPU", "on both",
        "on a GPU without a number", "no model yet", "more ranks than GPUs",
    ],
)  # fmt: skip
def test_device_follows_the_model(
    model: list[torch.device], gpus: int, nccl: bool, local_rank: int, expected: tuple[str, int | None]
) -> None:
    choice = devices.choose(model, gpus=gpus, nccl=nccl, local_rank=local_rank)
    assert (choice.backend, choice.gpu) == expected


def test_group_without_a_backend_for_the_model_is_refused() -> None:
    for backends, model in ((BOTH, [CPU, SECOND]), ("cpu:gloo", [CPU]), ("cuda:nccl", [SECOND]), ("cuda:nccl", [])):
        devices.check(backends, model)
    with pytest.raises(PlanError, match="the model is on cpu, but the process group has no backend") as caught:
        devices.check("cuda:nccl", [CPU])
    assert BOTH in caught.value.action
    with pytest.raises(PlanError, match="the model is on cuda"):
        devices.check("cpu:gloo", [SECOND])


def test_small_messages_stay_on_the_cpu_where_the_group_can_send_them() -> None:
    assert devices.for_small_messages(BOTH, 1) == devices.for_small_messages("cpu:gloo", 0) == CPU
    assert devices.for_small_messages("cuda:nccl", 1) == SECOND


def averaged_on_a_pretended_machine(backend: str | None) -> tuple[str, float]:
    """A model on the CPU of a machine that says it has GPUs: no call to CUDA may come."""
    torch.cuda.set_device = lambda device: pytest.fail(f"set_device({device})")  # type: ignore[assignment]
    torch.cuda.device_count = lambda: 4  # type: ignore[assignment]
    dist.is_nccl_available = lambda: True  # type: ignore[assignment]
    devices.ON_BOTH = "cpu:gloo,cuda:gloo"  # the nearest that a build without NCCL can make
    if backend is not None:
        dist.init_process_group(*([backend] if backend else []))
    model = syncline.DataParallel(nn.Linear(2, 1, bias=False), "bucketed")
    model(torch.ones(1, 2) * model.rank).sum().backward()
    assert model.communicator.device == CPU
    assert model.module.weight.grad is not None
    found = dist.get_backend_config(), float(model.module.weight.grad[0, 0])
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("backend", [None, "", "cpu:gloo", "cpu:gloo,cuda:gloo"])
def test_model_on_the_cpu_is_averaged_by_gloo_on_a_machine_with_gpus(backend: str | None, tmp_path: Path) -> None:
    """In a world that Syncline joins, and in groups that the user made: without a word, by device, and both."""
    expected = ("cpu:gloo,cuda:gloo" if backend is None else backend or "cpu:gloo", 0.5)
    # With a folder, because torch may warn about a group with several backends when it is destroyed.
    found = syncline.launch(averaged_on_a_pretended_machine, backend, workers=2, threads=1, log_dir=tmp_path)
    assert found == [expected] * 2
