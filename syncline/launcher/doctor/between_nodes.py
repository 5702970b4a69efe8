"""The links between nodes, examined: every node sends to node 0 and back for a moment, and looks for node 0's file.

Run at the same time on each node. Node 0 listens at the rendezvous and reports on all; the others say that they
reached it.
"""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from syncline.errors import UsageError
from syncline.launcher.doctor import Finding
from syncline.launcher.nodes.route import Route
from syncline.launcher.wire import Connection, Message, NotAFrame
from syncline.units import format_bit_rate

_SEND_SECONDS = 0.5
_PATIENCE_SECONDS = 20.0
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
                # What is no node of ours, or breaks off, is not counted; the node may come again.
                with contextlib.suppress(TimeoutError, ConnectionError, NotAFrame, KeyError, ValueError):
                    number, about_node = _serve(Connection(server.accept()[0]), token)
                    missing.discard(number)
                    findings += about_node
    except OSError as error:
        fix = "Run --node-rank 0 on the rendezvous host, with a port that is free."
        return [Finding("fail", "nodes", f"cannot listen at {route.target}:{route.port}: {error.strerror}", fix)]
    finally:
        token.unlink(missing_ok=True)
    fix = "Start `syncline doctor` there too, and open the port in its firewall."
    late = f"did not come in {group.wait_s:g} s"
    return [*findings, *(Finding("fail", f"node {number}", late, fix) for number in sorted(missing))]


def _serve(connection: Connection, token: Path) -> tuple[int, list[Finding]]:
    with contextlib.closing(connection):
        connection.set_patience(_PATIENCE_SECONDS)
        hello = _next(connection)
        connection.send({"say": "look", "for": str(token)})
        inward = _measure(connection)
        _flood(connection)
        seen = _next(connection)
    number, name = int(hello["node_rank"]), str(hello["host"])
    links = _links(f"node {number} ({name})", inward, float(seen["outward"]))
    return number, [links, _files(number, name, sees=bool(seen["sees"]))]


def _guest(route: Route, group: Group) -> list[Finding]:
    end = time.monotonic() + group.wait_s
    while True:
        try:
            with contextlib.closing(
                Connection(socket.create_connection((route.target, route.port), 5))
            ) as connection:
                _answer(connection, group)
            return [Finding("ok", "node 0", f"reached at {route.target}:{route.port}; it reports on the way between")]
        except (OSError, NotAFrame, KeyError) as error:
            if time.monotonic() > end:
                fix = "Start `syncline doctor --node-rank 0` there; open the port in its firewall."
                why = getattr(error, "strerror", None) or str(error) or "what listens there is no node 0"
                return [Finding("fail", "node 0", f"{route.target}:{route.port}: {why}", fix)]
            time.sleep(0.2)


def _answer(connection: Connection, group: Group) -> None:
    connection.set_patience(_PATIENCE_SECONDS)
    connection.send({"say": "hello", "node_rank": group.node_rank, "host": socket.gethostname()})
    token = Path(str(_next(connection)["for"]))
    _flood(connection)
    outward = _measure(connection)
    connection.send({"say": "seen", "outward": outward, "sees": token.is_file()})


def _links(what: str, inward: float, outward: float) -> Finding:
    found = f"{format_bit_rate(inward)} to node 0, {format_bit_rate(outward)} from it, one connection"
    if min(inward, outward) < _SLOW_BITS_PER_S:
        fix = "Slow for training: check that the interface is the fast one (GLOO_SOCKET_IFNAME) and the link is idle."
        return Finding("warn", what, found, fix)
    return Finding("ok", what, found)


def _files(number: int, name: str, *, sees: bool) -> Finding:
    what = f"checkpoints on node {number}"
    if sees:
        return Finding("ok", what, f"{name} sees node 0's run folder")
    fix = "Put runs on a file system that all nodes share, to resume after node 0 is lost."
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
        raise UsageError(f"--node-rank {node_rank} is not one of {nodes} nodes.", action="Number them from 0.")
    return Group(nodes, node_rank, wait_s)
