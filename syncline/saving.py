"""save and load: all that a script needs to go on as if it had never stopped, in one file that plain torch can read.

    syncline.save("last.pt", model, optimizer, scheduler, loader, epoch=epoch)
    saved = syncline.load("last.pt", model, optimizer, scheduler, loader)          # saved["epoch"]
    torch.load("last.pt")["model"]                                                  # without Syncline

Collective: every rank calls them; rank 0 writes and reads, so that no common folder is needed. Besides the state of
what it is given, the file has every rank's random generators and the buffers that are a rank's own (batch norm), and
the order in which gradients are summed: on as many ranks, a loop goes on to the last bit.
"""

from __future__ import annotations

import hashlib
import io
import random
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from syncline import world
from syncline.comm import Communicator
from syncline.data_parallel import DataParallel
from syncline.errors import UsageError
from syncline.files import replacing

FORMAT = 1
OURS = "syncline"
"""Under this name the file has what is neither a part's state nor a user's value."""


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    loader: Any = None,
    **others: Any,
) -> None:
    """Write everything to `path`, whole or not at all. Collective.

    `others` are more parts by name: whatever has a state_dict (scaler, ema, a second model), and plain values.
    Gradients are not saved: call it after the optimiser's step.
    """
    with world.talking() as channel:
        _save(Path(path), _parts(model, optimizer, scheduler, loader, others), channel)


def _save(path: Path, parts: Mapping[str, Any], channel: Communicator) -> None:
    models = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    blobs = _to_rank_0(channel, _packed(_of_rank(channel, models)))
    problem = ""
    if channel.rank == 0:
        content = {name: _state(part) for name, part in parts.items()}
        content[OURS] = {
            "format": FORMAT,
            "world_size": channel.world_size,
            "ranks": [_unpacked(blob) for blob in blobs],
            "sync": {name: _order(part) for name, part in models.items() if _is_attached(part)},
        }
        problem = _problem(lambda: _write(path, content))
    problem = _from_rank_0(channel, problem.encode()).decode()
    if problem:
        raise UsageError(
            f"cannot write the checkpoint {path}: {problem}.", action="Free space, or give another path."
        )


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    loader: Any = None,
    *,
    weights_only: bool = True,
    **others: Any,
) -> dict[str, Any]:
    """Put the saved state back into everything given; returns the rest of the file by name. Collective.

    Nothing is changed if the file lacks a part or its model differs. `weights_only` is torch.load's: False also reads
    objects of any class, which a file from an untrusted source can misuse.
    """
    parts = _parts(model, optimizer, scheduler, loader, others)
    channel = world.channel()
    content = _read(Path(path), channel, weights_only=weights_only)
    ours = content.pop(OURS)
    _check(path, parts, content)
    for name, part in parts.items():
        state = content.pop(name)
        _plain(part).load_state_dict(state) if isinstance(part, nn.Module) else part.load_state_dict(state)
    if ours["world_size"] == channel.world_size:
        _restore_rank(ours, channel.rank, parts)
    elif channel.rank == 0:
        warnings.warn(
            f"{path} was saved on {ours['world_size']} ranks and is loaded on {channel.world_size}: the loop goes on "
            "with the same samples, but random draws and the order of sums differ.",
            stacklevel=2,
        )
    return content


def _parts(
    model: nn.Module, optimizer: Any, scheduler: Any, loader: Any, others: Mapping[str, Any]
) -> dict[str, Any]:
    if OURS in others:
        raise UsageError(f"the name {OURS!r} is taken.", action="Give the part another name.")
    named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    return {name: part for name, part in named.items() if part is not None} | dict(others)


def _plain(module: nn.Module) -> nn.Module:
    """Without the wrapper that averages its gradients."""
    return module.module if isinstance(module, DataParallel | DistributedDataParallel) else module


def _state(part: Any) -> Any:
    if isinstance(part, nn.Module):
        return _plain(part).state_dict()
    return part.state_dict() if hasattr(part, "state_dict") else part


def _is_attached(part: Any) -> TypeGuard[DataParallel]:
    """A copy of a wrapper meets the other ranks at its first forward."""
    return isinstance(part, DataParallel) and hasattr(part, "sync")


def _order(model: DataParallel) -> dict[str, Any]:
    """What decides in which order gradients are summed."""
    return {"method": model.method, "state": model.sync.state()}


# What is a rank's own.


def _of_rank(channel: Communicator, models: Mapping[str, nn.Module]) -> dict[str, Any]:
    return {
        "random": _random_state(),
        "buffers": {name: _own_buffers(channel, _plain(model)) for name, model in models.items()},
    }


def _own_buffers(channel: Communicator, model: nn.Module) -> dict[str, Tensor]:
    """Those that differ from rank 0's, and those that a state_dict leaves out. Collective."""
    buffers = dict(model.named_buffers())
    saved = model.state_dict().keys()
    digests = torch.tensor([_digest(buffer) for buffer in buffers.values()], dtype=torch.int64)
    first = digests
    if channel.world_size > 1 and buffers:
        with channel.scope("save"):
            first = channel.all_gather(digests.to(channel.device), label="buffers")[0].cpu()
    same = dict(zip(buffers, (digests == first).tolist(), strict=True))
    return {name: buffer for name, buffer in buffers.items() if not same[name] or name not in saved}


def _digest(tensor: Tensor) -> int:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def _restore_rank(ours: dict[str, Any], rank: int, parts: Mapping[str, Any]) -> None:
    own = ours["ranks"][rank]
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            present = dict(_plain(part).named_buffers())
            with torch.no_grad():
                for key, value in own["buffers"].get(name, {}).items():
                    if key in present:
                        present[key].copy_(value)
        if _is_attached(part):
            order = ours["sync"].get(name, {})
            if order.get("method") == part.method:
                part.sync.load_state(order["state"])
    _set_random_state(own["random"])


def _random_state() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), *(float(value) for value in rest)),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), int(position), int(has_gauss), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# The file.


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        torch.save(content, file)


def _read(path: Path, channel: Communicator, *, weights_only: bool) -> dict[str, Any]:
    """Rank 0 reads and checks, and tells the others what it has, or what is wrong."""
    problem, blob = "", b""
    if channel.rank == 0:
        try:
            blob = path.read_bytes()
            problem = _fault(blob, weights_only=weights_only)
        except OSError as error:
            problem = "there is no such file." if isinstance(error, FileNotFoundError) else f"{error.strerror}."
    problem = _from_rank_0(channel, problem.encode()).decode()
    if problem:
        raise UsageError(f"cannot load the checkpoint {path}: {problem}")
    content: dict[str, Any] = _unpacked(_from_rank_0(channel, blob), weights_only=weights_only)
    return content


def _fault(blob: bytes, *, weights_only: bool) -> str:
    """What is wrong with the content of a file; empty if nothing is."""
    try:
        with zipfile.ZipFile(io.BytesIO(blob)) as archive:
            if archive.testzip() is not None:
                return "it is damaged: a checksum is wrong."
    except Exception:
        return "it is damaged, or torch.save did not write it."
    try:
        content = _unpacked(blob, weights_only=weights_only)
    except Exception as error:  # a damaged file can raise nearly anything
        if "weights_only" in str(error) or "Weights only" in str(error):
            return (
                "it holds objects of classes that torch.load refuses. If you trust the file, give weights_only=False."
            )
        return f"it is damaged ({type(error).__name__})."
    ours = content.get(OURS) if isinstance(content, dict) else None
    if not isinstance(ours, dict):
        return "syncline.save did not write it. Read it with torch.load."
    if ours.get("format") != FORMAT:
        return f"its format is {ours.get('format')}, and this version of Syncline reads {FORMAT}."
    return ""


def _check(path: str | Path, parts: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Before anything is changed."""
    for name, part in parts.items():
        if not hasattr(part, "load_state_dict"):
            raise UsageError(f"{name} cannot load a state.", action="Read plain values from what load returns.")
        if name not in content:
            raise UsageError(f"the checkpoint {path} has no {name}.", action=f"It has {', '.join(content)}.")
        if isinstance(part, nn.Module):
            own, saved = _shapes(_plain(part).state_dict()), _shapes(content[name])
            if own != saved:
                raise UsageError(
                    f"the {name} differs from that of the checkpoint {path}, first in {min(own ^ saved)[0]!r}.",
                    action="Load it into the same model.",
                )


def _shapes(state: Mapping[str, Any]) -> set[tuple[str, tuple[int, ...]]]:
    return {(name, tuple(getattr(value, "shape", ()))) for name, value in state.items()}


def _packed(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _unpacked(blob: bytes, *, weights_only: bool = True) -> Any:
    return torch.load(io.BytesIO(blob), map_location="cpu", weights_only=weights_only)


def _problem(action: Callable[[], None]) -> str:
    try:
        action()
    except Exception as error:  # also what torch says of a state that cannot be pickled
        return str(error).splitlines()[0].rstrip(".") or type(error).__name__
    return ""


# Bytes between ranks.


def _to_rank_0(channel: Communicator, blob: bytes) -> list[bytes]:
    """Every rank's, by rank, on rank 0."""
    if channel.world_size == 1:
        return [blob]
    with channel.scope("save"):
        own = torch.tensor([len(blob)], device=channel.device)
        lengths = [int(part.item()) for part in channel.all_gather(own, label="lengths")]
        sent = _as_bytes(blob.ljust(max(lengths), b"\0"), channel)
        received = [torch.empty_like(sent) for _ in lengths] if channel.rank == 0 else None
        channel.gather(sent, received, label="state of each rank")
    return [_blob(part)[:length] for part, length in zip(received or (), lengths, strict=False)]


def _from_rank_0(channel: Communicator, blob: bytes) -> bytes:
    if channel.world_size == 1:
        return blob
    with channel.scope("from rank 0"):
        length = torch.tensor([len(blob)], device=channel.device)
        channel.broadcast(length, label="length")
        if not length.item():
            return b""
        content = _as_bytes(blob if channel.rank == 0 else bytes(int(length.item())), channel)
        channel.broadcast(content, label="content")
    return _blob(content)


def _as_bytes(blob: bytes, channel: Communicator) -> Tensor:
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8).to(channel.device)


def _blob(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
