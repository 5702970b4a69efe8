"""The ways between nodes, examined: every node sends to node 0 and back for a moment, and looks for a file of its.

Run at the same time on each node. Node 0 listens at the rendezvous and reports on all; the others say that they met.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.errors import UsageError
from syncline.launcher.doctor import Finding
from syncline.launcher.nodes.route import Route
from syncline.units import format_bit_rate

_SEND_SECONDS = 0.5
_CHUNK = bytes(1 << 18)
_SLOW_BITS_PER_S = 5e8


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
        fix = "Other nodes cannot come that way: give node 0's address on the network."
        return Finding("warn", "interface", found, fix)
    return Finding("ok", "interface", found)


def examine_nodes(route: Route, group: Group, folder: Path) -> list[Finding]:
    """Node 0's findings are about every other node."""
    return _host(route, group, folder) if group.node_rank == 0 else _guest(route, group)


def _host(route: Route, group: Group, folder: Path) -> list[Finding]:
    folder.mkdir(parents=True, exist_ok=True)
    token = folder.resolve() / f".syncline-doctor-{uuid.uuid4().hex}"
    token.write_text("seen")
    findings, missing = [], set(range(1, group.nodes))
    end = time.monotonic() + group.wait_s
    try:
        with socket.create_server((route.target, route.port)) as server:
            while missing and time.monotonic() < end:
                server.settimeout(max(0.1, end - time.monotonic()))
                with contextlib.suppress(TimeoutError, ConnectionError, ValueError):
                    connection, _ = server.accept()
                    with connection:
                        number, found = _serve(connection, token)
                    missing.discard(number)
                    findings += found
    except OSError as error:
        fix = "Run --node-rank 0 on the rendezvous host, with a port that is free."
        return [Finding("fail", "nodes", f"cannot listen at {route.target}:{route.port}: {error.strerror}", fix)]
    finally:
        token.unlink(missing_ok=True)
    fix = "Start `syncline doctor` there too, and open the port in its firewall."
    findings += [
        Finding("fail", f"node {one}", f"did not come in {group.wait_s:g} s", fix) for one in sorted(missing)
    ]
    return findings


def _serve(connection: socket.socket, token: Path) -> tuple[int, list[Finding]]:
    connection.settimeout(20)
    stream = connection.makefile("rwb")
    hello = json.loads(stream.readline())
    _write(stream, {"token": str(token)})
    inward = _take(stream, hello["seconds"])
    _give(stream, hello["seconds"])
    told = json.loads(stream.readline())
    number, name = int(hello["node_rank"]), str(hello["host"])
    return number, [*_links(f"node {number} ({name})", inward, float(told["outward"])), _files(number, name, told)]


def _guest(route: Route, group: Group) -> list[Finding]:
    end = time.monotonic() + group.wait_s
    while True:
        try:
            connection = socket.create_connection((route.target, route.port), timeout=5)
            break
        except OSError as error:
            if time.monotonic() > end:
                fix = "Start `syncline doctor --node-rank 0` there; open the port in its firewall."
                return [Finding("fail", "node 0", f"{route.target}:{route.port}: {error.strerror or error}", fix)]
            time.sleep(0.2)
    with connection, connection.makefile("rwb") as stream:
        connection.settimeout(20)
        _write(stream, {"node_rank": group.node_rank, "host": socket.gethostname(), "seconds": _SEND_SECONDS})
        answer = json.loads(stream.readline())
        _give(stream, _SEND_SECONDS)
        outward = _take(stream, _SEND_SECONDS)
        sees = Path(answer["token"]).is_file()
        _write(stream, {"outward": outward, "sees": sees})
    return [Finding("ok", "node 0", f"reached at {route.target}:{route.port}; it reports on the way between")]


def _links(what: str, inward: float, outward: float) -> list[Finding]:
    found = f"{format_bit_rate(inward)} to node 0, {format_bit_rate(outward)} from it, one connection"
    if min(inward, outward) < _SLOW_BITS_PER_S:
        fix = "Slow for training: see that the interface is the fast one (GLOO_SOCKET_IFNAME) and the way is free."
        return [Finding("warn", what, found, fix)]
    return [Finding("ok", what, found)]


def _files(number: int, name: str, told: dict[str, Any]) -> Finding:
    what = f"checkpoints on node {number}"
    if told["sees"]:
        return Finding("ok", what, f"{name} sees node 0's run folder")
    fix = "Put runs on a file system that all nodes share, to resume after node 0 is lost."
    return Finding("warn", what, f"{name} does not see node 0's run folder", fix)


def _give(stream: Any, seconds: float) -> None:
    """A second's worth of chunks, each announced, then the end."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        stream.write(b"+" + _CHUNK)
    stream.write(b".")
    stream.flush()


def _take(stream: Any, seconds: float) -> float:
    """Bits per second, from the first chunk to the last."""
    total, begin = 0, time.monotonic()
    while stream.read(1) == b"+":
        total += len(stream.read(len(_CHUNK)))
    return total * 8 / max(time.monotonic() - begin, seconds / 10)


def _write(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def check_group(nodes: int | None, node_rank: int | None, wait_s: float) -> Group | None:
    """Both flags or none."""
    if (nodes is None) != (node_rank is None):
        raise UsageError("--nodes and --node-rank belong together.", action="Give both, on each node.")
    if nodes is None or node_rank is None:
        return None
    if not 0 <= node_rank < nodes:
        raise UsageError(f"--node-rank {node_rank} is not one of {nodes} nodes.", action="Number them from 0.")
    return Group(nodes, node_rank, wait_s)
