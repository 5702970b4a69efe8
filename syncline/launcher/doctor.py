"""Is this machine ready to run? One finding per question: ok, warn or fail, what was found, and the fix.

Between nodes, started on each of them at the same time: every node sends to node 0 and back for a moment, and looks
for node 0's file. Node 0 listens at the rendezvous and reports on all; the others say that they reached it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from syncline.errors import SynclineError, UsageError
from syncline.launcher.nodes.door import Door, NotLetIn, knock
from syncline.launcher.nodes.token import Tokens
from syncline.launcher.route import Route
from syncline.launcher.trust import is_loopback
from syncline.launcher.wire import Connection, Message, NotAFrame
from syncline.machine import (
    STRONG_MEMORY_ORDER,
    MachineLoad,
    available_bytes,
    bf16_instructions,
    cores,
    sample_load,
)
from syncline.readiness import is_busy, judged
from syncline.units import format_bit_rate, format_bytes

ENOUGH_MEMORY_BYTES = 2e9
ENOUGH_SHARED_BYTES = 64e6
_COPY_BYTES = 1 << 26
_SEND_SECONDS = 0.5
_PATIENCE_SECONDS = 20.0
_CHUNK = bytes(1 << 18)
_SLOW_BITS_PER_S = 5e8


@dataclass(frozen=True)
class Finding:
    status: Literal["ok", "warn", "fail"]
    what: str
    found: str
    fix: str = ""


def examine_machine(folder: Path) -> list[Finding]:
    """What this machine can do by itself. `folder` is where runs are written."""
    checks: list[Callable[[], Finding]] = [
        examine_load, examine_cores, examine_threads, examine_memory, examine_bandwidth, examine_bf16, examine_torch,
        examine_backends, examine_shared_memory, examine_emulation, lambda: examine_folder(folder),
    ]  # fmt: skip
    return [check() for check in checks]


def examine_load(sample: Callable[[], MachineLoad | None] = sample_load) -> Finding:
    """Comes first: what is measured on a busy machine is worth little, the figures below included."""
    load = sample()
    if load is None:
        return Finding("warn", "load", "unknown: there is no /proc/stat")
    if is_busy(load):
        return Finding("warn", "load", judged(load), "End other programs, or use --when-busy wait.")
    return Finding("ok", "load", str(load))


def examine_cores() -> Finding:
    usable, present = cores(), os.cpu_count() or 1
    found = f"{usable} of {present} usable"
    if usable < present:
        return Finding(
            "warn", "cores", found, "This process may not use the rest: check taskset, or what the job requested."
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
        return Finding("warn", "memory bandwidth", found, "The machine is busy or throttled: results will vary.")
    return Finding("ok", "memory bandwidth", found)


def examine_bf16(table: Path = Path("/proc/cpuinfo")) -> Finding:
    """Never more than a remark: float32 needs nothing."""
    names = bf16_instructions(table)
    if names:
        return Finding("ok", "bf16 compute", f"{', '.join(names)}: --precision bf16 may be faster")
    return Finding("ok", "bf16 compute", "no instructions for it: --precision bf16 works, but slows compute down")


def examine_torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("fail", "torch", f"cannot be loaded: {error}", "Install torch 2.13 or newer.")
    gpu = f", CUDA {torch.version.cuda}" if torch.version.cuda else ", no CUDA"
    onednn = "with" if torch.backends.mkldnn.is_available() else "without"
    found = f"{torch.__version__}{gpu}, {onednn} oneDNN, Python {platform.python_version()}"
    if not torch.distributed.is_available():
        return Finding("fail", "torch", found, "Install a build of torch that has torch.distributed.")
    return Finding("ok", "torch", found)


def examine_backends() -> Finding:
    import torch.distributed as dist

    backends = [name for name, has in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if has]
    if shutil.which("mpiexec") is not None or Path(sys.executable).with_name("mpiexec").exists():
        backends.append("mpi")
    if "gloo" not in backends:
        return Finding("fail", "backends", ", ".join(backends) or "none", "Install a torch that has Gloo.")
    return Finding("ok", "backends", ", ".join(backends))


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
            "fail", "shared memory", f"cannot be created: {error}", "Allow memfd_create, or use method bucketed."
        )
    free = room.f_bavail * room.f_frsize
    if free < ENOUGH_SHARED_BYTES:
        fix = "Loader processes need more: start the container with --shm-size=1g."
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
    return Finding("ok", "emulated hosts", f"two created in {seconds:.1f} s, {how}")


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
        return Finding(
            "warn", "run folder", f"{format_bytes(free)} free in {existing}", "Free some space for checkpoints."
        )
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


@dataclass(frozen=True)
class Group:
    """Who is examined: this node among so many, and how long it waits for the others."""

    nodes: int
    node_rank: int
    wait_s: float


def examine_way(route: Route) -> Finding:
    """Which interface leads to the rendezvous; loopback leads nowhere else."""
    found = f"{route.interface} ({route.address}) leads to {route.target}"
    if route.interface == "lo":
        fix = "Other nodes cannot connect through it: use node 0's address on the network."
        return Finding("warn", "interface", found, fix)
    return Finding("ok", "interface", found)


def examine_nodes(route: Route, group: Group, folder: Path, tokens: Tokens) -> list[Finding]:
    """Node 0's findings are about every other node."""
    if group.node_rank:
        return _as_other_node(route, group, tokens)
    try:
        with socket.create_server((route.target, route.port)) as listener:
            return _as_node_0(listener, route, group, folder, tokens)
    except OSError as error:
        fix = "Run --node-rank 0 on the rendezvous host, on a free port."
        return [Finding("fail", "nodes", f"cannot listen at {route.target}:{route.port}: {error.strerror}", fix)]


def _as_node_0(listener: socket.socket, route: Route, group: Group, folder: Path, tokens: Tokens) -> list[Finding]:
    folder.mkdir(parents=True, exist_ok=True)
    sign = folder.resolve() / f".syncline-doctor-{uuid.uuid4().hex}"
    sign.write_text("seen")
    findings, missing = [], set(range(1, group.nodes))
    end = time.monotonic() + group.wait_s
    proven: queue.Queue[tuple[Connection, int]] = queue.Queue()
    with contextlib.ExitStack() as stack:
        stack.callback(sign.unlink, missing_ok=True)
        credential = stack.enter_context(tokens.offered(_say, is_local=is_loopback(route.target)))
        door = Door(listener, credential, group.nodes, lambda connection, seat: proven.put((connection, seat)))
        stack.callback(door.close)
        while missing and time.monotonic() < end:
            # A node that breaks off is not counted; it may come again.
            with contextlib.suppress(queue.Empty, OSError, NotAFrame, KeyError, TypeError, ValueError):
                connection, node_rank = proven.get(timeout=max(0.1, end - time.monotonic()))
                findings += _serve(connection, node_rank, sign)
                missing.discard(node_rank)
    fix = "Start `syncline doctor` there too, and open the port in its firewall."
    late = f"did not connect within {group.wait_s:g} s"
    return [*findings, *(Finding("fail", f"node {node_rank}", late, fix) for node_rank in sorted(missing))]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _serve(connection: Connection, node_rank: int, sign: Path) -> list[Finding]:
    with contextlib.closing(connection):
        connection.set_patience(_PATIENCE_SECONDS)
        name = str(_next(connection)["host"])
        connection.send({"say": "look", "for": str(sign)})
        inward = _measure(connection)
        _flood(connection)
        report = _next(connection)
    links = _links(f"node {node_rank} ({name})", inward, float(report["outward"]))
    return [links, _files(node_rank, name, sees=bool(report["sees"]))]


def _as_other_node(route: Route, group: Group, tokens: Tokens) -> list[Finding]:
    end = time.monotonic() + group.wait_s
    while True:
        try:
            with contextlib.closing(
                Connection(socket.create_connection((route.target, route.port), 5))
            ) as connection:
                knock(connection, tokens.found, group.node_rank)
                _answer(connection)
            return [Finding("ok", "node 0", f"reached at {route.target}:{route.port}; it reports on the link")]
        except NotLetIn as refused:
            if not refused.may_pass or time.monotonic() > end:
                return [Finding("fail", "node 0", refused.error.message, refused.error.action)]
            time.sleep(0.2)
        except (OSError, NotAFrame, KeyError) as error:
            if time.monotonic() > end:
                fix = "Start `syncline doctor --node-rank 0` there; open the port in its firewall."
                why = getattr(error, "strerror", None) or str(error) or "the program there is not node 0"
                return [Finding("fail", "node 0", f"{route.target}:{route.port}: {why}", fix)]
            time.sleep(0.2)


def _answer(connection: Connection) -> None:
    connection.set_patience(_PATIENCE_SECONDS)
    connection.send({"say": "hello", "host": socket.gethostname()})
    sign = Path(str(_next(connection)["for"]))
    _flood(connection)
    outward = _measure(connection)
    connection.send({"say": "seen", "outward": outward, "sees": sign.is_file()})


def _links(what: str, inward: float, outward: float) -> Finding:
    found = f"{format_bit_rate(inward)} to node 0, {format_bit_rate(outward)} from it, one connection"
    if min(inward, outward) < _SLOW_BITS_PER_S:
        fix = "Slow for training: check that the interface is the fast one (GLOO_SOCKET_IFNAME) and the link is idle."
        return Finding("warn", what, found, fix)
    return Finding("ok", what, found)


def _files(node_rank: int, name: str, *, sees: bool) -> Finding:
    what = f"checkpoints on node {node_rank}"
    if sees:
        return Finding("ok", what, f"{name} sees node 0's run folder")
    fix = "Its checkpoints go to node 0. Share the folder, or use --run-dir s3://…, in case node 0 is lost."
    return Finding("warn", what, f"{name} does not see node 0's run folder", fix)


def _flood(connection: Connection) -> None:
    """Chunks for half a second, then the end."""
    end = time.monotonic() + _SEND_SECONDS
    while time.monotonic() < end and connection.send({"say": "chunk"}, _CHUNK):
        pass
    connection.send({"say": "end"})


def _measure(connection: Connection) -> float:
    """Bits per second, from the first chunk to the end."""
    total, begin = 0, time.monotonic()
    while (received := connection.receive()) is not None and received[0]["say"] == "chunk":
        total += len(received[1])
    return total * 8 / max(time.monotonic() - begin, _SEND_SECONDS / 10)


def _next(connection: Connection) -> Message:
    received = connection.receive()
    if received is None:
        raise ConnectionError("the connection broke off")
    return received[0]


def check_group(nodes: int | None, node_rank: int | None, wait_s: float) -> Group | None:
    """Both flags or none."""
    if (nodes is None) != (node_rank is None):
        raise UsageError("--nodes and --node-rank belong together.", action="Give both, on each node.")
    if nodes is None or node_rank is None:
        return None
    if not 0 <= node_rank < nodes:
        raise UsageError(f"--node-rank {node_rank} is out of range for {nodes} nodes.", action="Number them from 0.")
    return Group(nodes, node_rank, wait_s)
