"""Checkpoints: all that a run needs to continue as if it had never stopped, to the last bit.

One folder per checkpoint, one file per rank: batch-norm buffers and running sums are each rank's own; parameters and
optimiser state are the same everywhere, so only the folder's keeper writes them, its first rank. The folder is
written aside and renamed when all ranks are done, and the one before it is removed after that. What a step draws at
random follows from its number and is not saved.

Nodes without a common folder have one each, with a keeper each. All go on from the newest checkpoint that all have.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from syncline.comm.communicator import Communicator
from syncline.errors import RunFolderError
from syncline.files import write_atomic
from syncline.training.step import Worker

FORMAT = 3
_NAME = re.compile(r"step-(\d+)")


@dataclass
class Progress:
    """How far a run is. The sums are of this rank's own shards of the current epoch."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    loss_sum: float = 0.0
    score_sum: float = 0.0
    num_samples: int = 0
    loss_lines: list[dict[str, Any]] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)


def save(folder: Path, worker: Worker, progress: Progress, communicator: Communicator, keeper: int = 0) -> None:
    """Collective. Nothing that looks like a checkpoint exists before every rank's part is on disk."""
    worker.sync.synchronize()
    name = f"step-{progress.step:08d}"
    aside = folder / f".{name}.part"
    aside.mkdir(parents=True, exist_ok=True)
    _write(aside / f"rank-{communicator.rank}.pt", _state(worker, progress, shared=communicator.rank == keeper))
    _wait_for_all(communicator)
    older = list_checkpoints(folder) if communicator.rank == keeper else []
    if communicator.rank == keeper:
        shutil.rmtree(folder / name, ignore_errors=True)
        aside.rename(folder / name)
    _wait_for_all(communicator)
    for path in older:
        if path.name != name:
            shutil.rmtree(path, ignore_errors=True)


def load(folder: Path, worker: Worker, communicator: Communicator, keeper: int = 0) -> Progress:
    """Put the newest checkpoint's state into the worker; returns how far it was. Collective."""
    checkpoints = {int(path.name.removeprefix("step-")): path for path in list_checkpoints(folder)}
    # An older one is removed only when every folder has the newer one: the lowest of the newest is in all of them.
    step = min(_from_all(communicator, max(checkpoints, default=0)))
    if step == 0:
        return Progress()
    newest = checkpoints[step]
    shared = _read(newest / f"rank-{keeper}.pt")
    own = shared if communicator.rank == keeper else _read(newest / f"rank-{communicator.rank}.pt")
    _restore(worker.model.named_parameters(), shared["parameters"], newest)
    _restore(worker.model.named_buffers(), own["buffers"], newest)
    worker.optimizer.load_state_dict(shared["optimizer"])
    worker.sync.load_state(shared["sync"])
    return Progress(**own["progress"])


def _restore(tensors: Iterable[tuple[str, Tensor]], saved: dict[str, Tensor], path: Path) -> None:
    """By name: load_state_dict would refuse tied parameters and buffers that are not persistent."""
    present = dict(tensors)
    if {name: value.shape for name, value in present.items()} != {name: value.shape for name, value in saved.items()}:
        raise RunFolderError(
            f"the model differs from that of {path}.", action="Resume with the same model, or start a new run."
        )
    with torch.no_grad():
        for name, tensor in present.items():
            tensor.copy_(saved[name])


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))


def _state(worker: Worker, progress: Progress, *, shared: bool) -> dict[str, Any]:
    state: dict[str, Any] = {
        "format": FORMAT,
        "buffers": dict(worker.model.named_buffers()),
        "progress": asdict(progress),
    }
    if shared:
        state["parameters"] = dict(worker.model.named_parameters())
        state["optimizer"] = worker.optimizer.state_dict()
        state["sync"] = worker.sync.state()
    return state


def _wait_for_all(communicator: Communicator) -> None:
    with communicator.scope("checkpoint"):
        communicator.all_reduce(torch.zeros(1, device=communicator.device), label="checkpoint written")


def _from_all(communicator: Communicator, value: int) -> list[int]:
    with communicator.scope("checkpoint"):
        parts = communicator.all_gather(torch.tensor([value], device=communicator.device))
    return [int(part.item()) for part in parts]


def _write(path: Path, state: dict[str, Any]) -> None:
    content = io.BytesIO()
    torch.save(state, content)
    write_atomic(path, content.getbuffer())


def _read(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, EOFError) as error:
        raise RunFolderError(f"cannot read the checkpoint {path}: {error}.", action="Start a new run.") from error
    if state.get("format") != FORMAT:
        raise RunFolderError(
            f"{path} has checkpoint format {state.get('format')}, this version reads {FORMAT}.",
            action="Use the version of Syncline that wrote it.",
        )
    return state
