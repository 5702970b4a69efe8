"""Is this machine ready to run? One finding per question: ok, warn or fail, what was found, and the fix."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from syncline.errors import SynclineError, UsageError
from syncline.machine import STRONG_MEMORY_ORDER, available_bytes, cores
from syncline.units import format_bytes

ENOUGH_MEMORY_BYTES = 2e9
ENOUGH_SHARED_BYTES = 64e6
_COPY_BYTES = 1 << 26


@dataclass(frozen=True)
class Finding:
    status: Literal["ok", "warn", "fail"]
    what: str
    found: str
    fix: str = ""


def examine_machine(folder: Path) -> list[Finding]:
    """What this machine can do by itself. `folder` is where runs are written."""
    checks: list[Callable[[], Finding]] = [
        examine_cores, examine_threads, examine_memory, examine_bandwidth, examine_torch, examine_backends,
        examine_shared_memory, examine_emulation, lambda: examine_folder(folder),
    ]  # fmt: skip
    return [check() for check in checks]


def examine_cores() -> Finding:
    usable, present = cores(), os.cpu_count() or 1
    found = f"{usable} of {present} usable"
    if usable < present:
        return Finding(
            "warn", "cores", found, "The process is bound to some of them: see taskset, or the job's request."
        )
    return Finding("ok", "cores", found)


def examine_threads() -> Finding:
    text = os.environ.get("OMP_NUM_THREADS")
    if text is None:
        return Finding("ok", "threads", f"one rank may use {cores()}; OMP_NUM_THREADS is not set")
    if not text.isdigit() or int(text) > cores():
        fix = f"Unset it, or set it to {cores()} or less."
        return Finding("warn", "threads", f"OMP_NUM_THREADS is {text} on {cores()} cores", fix)
    return Finding("ok", "threads", f"OMP_NUM_THREADS is {text}")


def examine_memory(table: Path = Path("/proc/meminfo")) -> Finding:
    try:
        free = available_bytes(table)
    except (OSError, IndexError):
        return Finding("warn", "memory", "unknown: there is no /proc/meminfo")
    found = f"{format_bytes(free)} available"
    if free < ENOUGH_MEMORY_BYTES:
        return Finding(
            "warn", "memory", found, "A rank needs about 0.4 GB: use fewer workers, or close other programs."
        )
    return Finding("ok", "memory", found)


def examine_bandwidth() -> Finding:
    """The fastest of a few copies of 64 MB by one thread, which is beyond any cache: bytes read and written."""
    import numpy as np

    source, target = np.ones(_COPY_BYTES // 8), np.zeros(_COPY_BYTES // 8)
    fastest = min(_seconds(lambda: np.copyto(target, source)) for _ in range(5))
    rate = 2 * _COPY_BYTES / fastest
    found = f"{format_bytes(rate)}/s, one thread copying"
    if rate < 2e9:
        return Finding("warn", "memory bandwidth", found, "The machine is busy or throttled: figures will vary.")
    return Finding("ok", "memory bandwidth", found)


def examine_torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("fail", "torch", f"cannot be loaded: {error}", "Install torch 2.13 or newer.")
    gpu = f", CUDA {torch.version.cuda}" if torch.version.cuda else ", no CUDA"
    onednn = "with" if torch.backends.mkldnn.is_available() else "without"
    found = f"{torch.__version__}{gpu}, {onednn} oneDNN, Python {platform.python_version()}"
    if not torch.distributed.is_available():
        return Finding("fail", "torch", found, "This build has no torch.distributed: install another.")
    return Finding("ok", "torch", found)


def examine_backends() -> Finding:
    import torch.distributed as dist

    there = [name for name, has in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if has]
    if shutil.which("mpiexec") is not None or Path(sys.executable).with_name("mpiexec").exists():
        there.append("mpi")
    if "gloo" not in there:
        return Finding("fail", "backends", ", ".join(there) or "none", "Ranks on CPU need a torch with Gloo.")
    return Finding("ok", "backends", ", ".join(there))


def examine_shared_memory() -> Finding:
    """A segment is really made: containers differ in what they allow."""
    if platform.machine() not in STRONG_MEMORY_ORDER:
        return Finding("warn", "shared memory", f"not used on {platform.machine()}", "Use method bucketed.")
    try:
        descriptor = os.memfd_create("syncline-doctor")
        try:
            os.posix_fallocate(descriptor, 0, 1 << 20)
        finally:
            os.close(descriptor)
        room = os.statvfs("/dev/shm")
    except (AttributeError, OSError) as error:
        return Finding(
            "fail", "shared memory", f"cannot be made: {error}", "Allow memfd_create, or use method bucketed."
        )
    free = room.f_bavail * room.f_frsize
    if free < ENOUGH_SHARED_BYTES:
        fix = "Loader processes need it: in a container, start it with --shm-size=1g."
        return Finding("warn", "shared memory", f"{format_bytes(free)} free in /dev/shm", fix)
    return Finding("ok", "shared memory", f"works; {format_bytes(free)} free in /dev/shm")


def examine_emulation() -> Finding:
    """A cluster of two hosts is really made, and gone again."""
    from syncline.launcher.emulation import EmulatedCluster
    from syncline.launcher.emulation.namespaces import is_privileged

    try:
        begin = time.monotonic()
        with EmulatedCluster(2, [1e9, 1e9]):
            seconds = time.monotonic() - begin
    except UsageError as error:
        return Finding("warn", "emulated hosts", error.message, error.action)
    except SynclineError as error:
        return Finding("fail", "emulated hosts", error.message, error.action)
    how = "as root" if is_privileged() else "in a user namespace"
    return Finding("ok", "emulated hosts", f"two made in {seconds:.1f} s, {how}")


def examine_folder(folder: Path) -> Finding:
    """Runs and checkpoints are written here: into the nearest folder above it that exists."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".syncline-doctor-") as file:
            file.write(b"x" * 4096)
    except OSError as error:
        return Finding("fail", "run folder", f"{existing}: {error.strerror}", "Choose another folder with --folder.")
    free = shutil.disk_usage(existing).free
    if free < 1e9:
        return Finding("warn", "run folder", f"{format_bytes(free)} free in {existing}", "Checkpoints need room.")
    return Finding("ok", "run folder", f"{existing}, {format_bytes(free)} free")


def examine_system() -> list[Finding]:
    """Comes first, and alone where nothing else would work."""
    if platform.system() == "Linux":
        return []
    return [Finding("warn", "system", platform.platform(), "Emulated hosts and shared memory need Linux.")]


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
