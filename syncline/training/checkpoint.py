"""Checkpoints: all that a run needs to continue as if it had never stopped, to the last bit.

One folder per checkpoint, one file per rank: batch-norm buffers and running sums are each rank's own; parameters and
optimiser state are the same everywhere, so only rank 0 writes them. The folder is written aside and renamed when all
ranks are done; the newest two are kept, so that there is one to go back to if the last is damaged. What a step draws
at random follows from its number and is not saved.

Every file has its digest in checkpoint.json (see manifest.py), with the plan. Each rank checks what it reads, and all
go on or none does. Checkpoints of earlier versions have no digests: only damage that shows by itself is found.

There is one folder for all ranks. Those that do not see it write to it and read it over a connection.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor

from syncline.comm.communicator import Communicator
from syncline.errors import RunFolderError
from syncline.folders import Folder
from syncline.plan import Plan
from syncline.training.manifest import (
    NAME,
    Manifest,
    check_plan,
    digest,
    find_checkpoints,
    folder_name,
    rank_file,
    rank_name,
    read_manifest,
)
from syncline.training.step import Worker

Result = TypeVar("Result")

FORMAT = 4
WITHOUT_DIGESTS = 3
KEPT = 2
"""The newest, and the one before in case that one is damaged."""


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


def save(folder: Folder, plan: Plan, worker: Worker, progress: Progress, communicator: Communicator) -> None:
    """Collective. Nothing that looks like a checkpoint exists before every rank's part is in the folder."""
    worker.sync.synchronize()
    name, is_first = folder_name(progress.step), communicator.rank == 0
    aside = f".{name}.part"
    content = _packed(_state(worker, progress, shared=is_first))
    folder.write(f"{aside}/{rank_name(communicator.rank)}", content)
    digests = _all_bytes(communicator, bytes.fromhex(digest(content)), "checkpoint written")
    if is_first:
        values = plan.model_dump(mode="json", exclude_none=True)
        Manifest(step=progress.step, plan=values, ranks=[part.hex() for part in digests]).write(folder, aside)
        folder.rename(aside, name)
    _all_bytes(communicator, b"", "checkpoint in place")
    if is_first:
        older = [other for other in find_checkpoints(folder).values() if other <= name]
        unfinished = [other for other in folder.names() if other.startswith(".step-") and other.endswith(".part")]
        for other in (*older[:-KEPT], *unfinished):
            folder.remove(other)


def load(
    folder: Folder, plan: Plan, worker: Worker, communicator: Communicator,
    say: Callable[[str], None] = lambda text: None,
) -> Progress:  # fmt: skip
    """Put the newest checkpoint's state into the worker; returns how far it was. Collective.

    If one rank cannot use it, every rank raises that rank's RunFolderError, with the newest checkpoint that is good.
    """
    reader = _Reader(folder, plan, communicator)
    # A shared file system may show the newest to some ranks late: the lowest is there for all of them.
    step = min(_from_all(communicator, max(_together(communicator, lambda: reader.checkpoints), default=0)))
    if step == 0:
        return Progress()
    found = _together(communicator, lambda: reader.read(step))
    if len(set(_all_bytes(communicator, bytes.fromhex(found.digest), "same checkpoint"))) > 1:
        raise RunFolderError(
            f"ranks found different checkpoints as {found.where}: their folders are of different runs.",
            action="Start every rank with the same run folder.",
        )
    if not found.has_digests:
        say(f"{found.where} is of an earlier version and carries no digest: damage to it may go unnoticed")
    return _together(communicator, lambda: _put(found, worker))


@dataclass(frozen=True)
class _Found:
    """What a rank read of a checkpoint."""

    where: str
    name: str
    digest: str
    """Of its checkpoint.json; zeros where an earlier version wrote none."""
    shared: dict[str, Any]
    own: dict[str, Any]

    @property
    def has_digests(self) -> bool:
        return any(bytes.fromhex(self.digest))


@dataclass(frozen=True)
class _Reader:
    """Reads checkpoints as one rank, and says what is wrong with them."""

    folder: Folder
    plan: Plan
    communicator: Communicator

    @property
    def checkpoints(self) -> dict[int, str]:
        try:
            return find_checkpoints(self.folder)
        except OSError as error:
            raise RunFolderError(f"cannot read {self.folder.path}: {error.strerror}.") from None

    def read(self, step: int) -> _Found:
        """Raises RunFolderError, with the newest older one that is good, if there is one."""
        try:
            return self._read(self._at(step))
        except RunFolderError as error:
            raise RunFolderError(error.message, action=error.action or self._way_out(step)) from None

    def _at(self, step: int) -> str:
        if step not in self.checkpoints:
            raise RunFolderError(f"{self.folder.path} lacks {folder_name(step)}, which other ranks go on from.")
        return self.checkpoints[step]

    def _read(self, name: str) -> _Found:
        rank, manifest, path = self.communicator.rank, None, self.folder.path / name
        blobs = {number: self._bytes(f"{name}/{rank_name(number)}") for number in {rank, 0}}
        # A damaged file may look like one of an earlier version, but those have no checkpoint.json beside them.
        if NAME in self.folder.names(name) or not all(map(_is_earlier, blobs.values())):
            manifest = read_manifest(self.folder, name)
            self._check(manifest, blobs, path)
        states = {number: _state_in(blob, rank_file(path, number)) for number, blob in blobs.items()}
        for number, state in states.items():
            if manifest is None and (bad := next(_not_finite(state), None)):
                raise RunFolderError(f"{rank_file(path, number)} is damaged: {bad} holds NaN or infinity.")
        return _Found(str(path), name, manifest.digest if manifest else "00" * 32, states[0], states[rank])

    def _bytes(self, name: str) -> bytes:
        try:
            return self.folder.read(name)
        except OSError as error:
            raise RunFolderError(f"cannot read the checkpoint {self.folder.path / name}: {error.strerror}.") from None

    def _check(self, manifest: Manifest, blobs: Mapping[int, bytes], path: Path) -> None:
        if len(manifest.ranks) != self.communicator.world_size:
            raise RunFolderError(f"{path} is of {len(manifest.ranks)} ranks, not {self.communicator.world_size}.")
        for number, blob in blobs.items():
            if digest(blob) != manifest.ranks[number]:
                raise RunFolderError(f"{rank_file(path, number)} is damaged: it does not match its digest.")
        if self.communicator.rank == 0:  # who wrote it: another node may compute with more threads
            check_plan(manifest, self.plan, path)

    def _way_out(self, bad: int) -> str:
        path = self.folder.path
        for step, name in reversed(self.checkpoints.items()):
            if step < bad and self._is_good(name):
                return f"To continue from {name}, the newest good one, remove {path / folder_name(bad)}."
        return f"No other is left: remove {path} to train from the start."

    def _is_good(self, name: str) -> bool:
        try:
            self._read(name)
        except RunFolderError:
            return False
        return True


def _put(found: _Found, worker: Worker) -> Progress:
    """Into the worker. A state that torch or the method cannot take is refused, whatever they raise."""
    try:
        shared, own = found.shared, found.own
        _restore(worker.model.named_parameters(), shared["parameters"])
        _restore(worker.model.named_buffers(), own["buffers"])
        _check_optimizer(worker.optimizer, shared["optimizer"])
        worker.optimizer.load_state_dict(shared["optimizer"])
        worker.sync.load_state(shared["sync"])
        progress = TypeAdapter(Progress).validate_json(json.dumps(own["progress"]), strict=True)
        if {progress.step, shared["progress"]["step"]} != {int(found.name.removeprefix("step-"))}:
            raise ValueError("its ranks' files are of different steps")
    except _Misfit as error:
        raise RunFolderError(
            f"the model differs from that of {found.where}: {error}.",
            action="Resume with the same model, or start a new run.",
        ) from None
    except Exception as error:  # what a foreign state makes torch, pydantic or a method raise is not foreseeable
        reason = str(error).splitlines()[0] if isinstance(error, ValueError) and str(error) else type(error).__name__
        raise RunFolderError(f"{found.where} does not fit this run ({reason}).", action="Start a new run.") from error
    return progress


class _Misfit(Exception):
    """Of which tensor, and how."""


def _restore(tensors: Iterable[tuple[str, Tensor]], saved: dict[str, Tensor]) -> None:
    """By name: load_state_dict would refuse tied parameters and buffers that are not persistent."""
    present = dict(tensors)
    here, there = ({name: _kind(value) for name, value in group.items()} for group in (present, saved))
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise _Misfit(f"{name} is {here.get(name, 'absent')} here, {there.get(name, 'absent')} there")
    with torch.no_grad():
        for name, tensor in present.items():
            tensor.copy_(saved[name])


def _kind(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"


def _check_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """torch checks how many parameters there are, not what it kept of each."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, kept in saved["state"].items():
        shapes = (parameters[number].shape, torch.Size([]), torch.Size([1]))
        wrong = [name for name, value in kept.items() if isinstance(value, Tensor) and value.shape not in shapes]
        if wrong:
            raise ValueError(f"the optimiser's {wrong[0]} has another shape than its parameter")


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


# Files.


def _packed(state: dict[str, Any]) -> memoryview:
    content = io.BytesIO()
    torch.save(state, content)
    return content.getbuffer()


def _is_earlier(blob: bytes) -> bool:
    try:
        return bool(_unpacked(blob)["format"] == WITHOUT_DIGESTS)
    except Exception:  # damaged: nearly anything
        return False


def _state_in(blob: bytes, path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(io.BytesIO(blob)) as archive:
            whole = archive.testzip() is None
        state = _unpacked(blob) if whole else None
    except Exception as error:  # a damaged file can raise nearly anything
        raise RunFolderError(f"cannot read the checkpoint {path}: it is damaged ({type(error).__name__}).") from None
    if not isinstance(state, dict):
        raise RunFolderError(f"cannot read the checkpoint {path}: it is damaged.")
    if state.get("format") not in (FORMAT, WITHOUT_DIGESTS):
        raise RunFolderError(
            f"{path} has checkpoint format {state.get('format')}, this version reads {FORMAT}.",
            action="Use the version of Syncline that wrote it.",
        )
    return state


def _unpacked(blob: bytes) -> Any:
    return torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)


def _not_finite(value: Any, name: str = "") -> Iterator[str]:
    """Names of the tensors in it that have NaN or infinity."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            yield name
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _not_finite(inner, f"{name}.{key}" if name else str(key))


# Between ranks.


def _all_bytes(communicator: Communicator, own: bytes, what: str) -> list[bytes]:
    """Every rank's, as long as this rank's own; of none, only that all have come here."""
    sent = torch.tensor([*own, 0], dtype=torch.uint8, device=communicator.device)
    with communicator.scope("checkpoint"):
        parts = communicator.all_gather(sent, label=what)
    return [bytes(part[:-1].tolist()) for part in parts]


def _from_all(communicator: Communicator, value: int) -> list[int]:
    with communicator.scope("checkpoint"):
        parts = communicator.all_gather(torch.tensor([value], device=communicator.device))
    return [int(part.item()) for part in parts]


def _together(communicator: Communicator, act: Callable[[], Result]) -> Result:
    """Its result, if no rank has a problem with it. The first rank's problem is raised on every rank, so that none
    waits for one that is gone."""
    result, problem = None, RunFolderError("")
    try:
        result = act()
    except RunFolderError as error:
        problem = error
    blobs = [text.encode() for text in (problem.message, problem.action)]
    lengths = [_from_all(communicator, len(blob)) for blob in blobs]
    first = next((rank for rank, length in enumerate(lengths[0]) if length), None)
    if first is None:
        assert result is not None
        return result
    words = []
    with communicator.scope("checkpoint"):
        for blob, length in zip(blobs, lengths, strict=True):
            content = blob if communicator.rank == first else bytes(length[first])
            text = torch.tensor([*content, 0], dtype=torch.uint8, device=communicator.device)
            communicator.broadcast(text, root=first, label="what is wrong")
            words.append(bytes(text[:-1].tolist()).decode())
    raise RunFolderError(words[0], action=words[1])
