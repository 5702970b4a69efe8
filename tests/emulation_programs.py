"""What runs on the emulated hosts of the tests, and what starts clusters there only to be killed.

python emulation_programs.py NAME [ARGUMENT…]
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PORT = 5000
_PR_CAPBSET_DROP = 24
_CAP_SETFCAP = 31


def receive(count: str) -> None:
    """Take one connection and what comes over it; print how much and how long it took."""
    with socket.create_server(("", PORT)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
        begin, received = time.monotonic(), 0
        with connection:
            while received < int(count):
                part = connection.recv(1 << 16)
                if not part:
                    break
                received += len(part)
        print(received, time.monotonic() - begin)


def send(target: str, count: str) -> None:
    with socket.create_connection((target, PORT), timeout=60) as connection:
        connection.sendall(bytes(int(count)))


def reach(target: str) -> None:
    """Exit code 0 if the target can be spoken to within a second."""
    try:
        socket.create_connection((target, PORT), timeout=1).close()
    except OSError:
        sys.exit(1)


def daemon() -> None:
    """A process that got away from its parents: another session, twice forked, deaf to polite signals."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            import signal

            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(300)
    os._exit(0)


def hold(ready: str) -> None:
    """A launcher with a busy cluster; it waits to be killed."""
    from syncline.launcher.emulation import EmulatedCluster

    with EmulatedCluster(2, [1e9, 1e9]) as cluster:
        Path("/dev/shm").stat()
        for host in range(2):
            cluster.popen(host, [sys.executable, __file__, "daemon"]).wait(60)
            cluster.popen(host, ["sh", "-c", "echo mine > /dev/shm/segment; sleep 300"])
            cluster.call(host, time.sleep, 300)
        Path(ready).write_text("ready")
        time.sleep(300)


def powerless(keep: str, *command: str) -> None:
    """Run a command as somebody who has no privileges, only perhaps the one that user namespaces of root need."""
    libc = ctypes.CDLL(None)
    for capability in range(64):
        if not (keep == "setfcap" and capability == _CAP_SETFCAP):
            libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    sys.exit(subprocess.run(command).returncode)


def two_hosts() -> None:
    """The whole way once: two hosts, a transfer, a cut, a new rate."""
    from syncline.errors import SynclineError
    from syncline.launcher.emulation import EmulatedCluster

    try:
        with EmulatedCluster(2, [1e9, 1e8]) as cluster:
            receiver = cluster.popen(1, [sys.executable, __file__, "receive", "100000"], stdout=subprocess.PIPE)
            assert receiver.stdout is not None
            receiver.stdout.readline()
            assert cluster.popen(0, [sys.executable, __file__, "send", "host1", "100000"]).wait(60) == 0
            print(receiver.stdout.read().split()[0].decode(), receiver.wait(60))
            cluster.cut(1)
            cluster.restore(1)
            cluster.set_rate(0, 1e7)
            assert cluster.call(0, os.uname).result(20).nodename == "host0"
    except SynclineError as error:
        print(error)
        sys.exit(error.exit_code)


def between_nodes(node_rank: str, nodes: str, wait_s: str, folder: str) -> None:
    """This host's findings of `syncline doctor --nodes`, as JSON."""
    from dataclasses import asdict

    from syncline.launcher.doctor import Group, examine_nodes, examine_way
    from syncline.launcher.nodes.token import Tokens
    from syncline.launcher.route import find_route

    rendezvous = f"host0:{PORT}"
    route, tokens = find_route(rendezvous), Tokens(rendezvous, folder=Path(folder))
    findings = examine_nodes(route, Group(int(nodes), int(node_rank), float(wait_s)), Path(folder), tokens)
    print(json.dumps([asdict(one) for one in [examine_way(route), *findings]]))


if __name__ == "__main__":
    PROGRAMS: dict[str, Callable[..., None]] = {
        one.__name__: one for one in (receive, send, reach, daemon, hold, powerless, two_hosts, between_nodes)
    }
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
