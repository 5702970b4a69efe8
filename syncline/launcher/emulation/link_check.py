"""Do the links of an emulated cluster reach their rates on this machine? Every result says so if they do not."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from syncline.launcher.emulation import EmulatedCluster
from syncline.launcher.emulation.network import host_name
from syncline.units import format_bit_rate

REACHED = 0.9
"""The share of its rate that a link must carry; frames and headers alone take 5 % of it."""
_CHECK_SECONDS = 1.0
_PATIENCE_SECONDS = 20.0
_PORT = 29499
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class LinkCheck:
    """What each host sent to the next one when all hosts sent at once, in bits per second; and what it should have
    been: the slower of the two links."""

    asked: list[float]
    measured: list[float]

    @property
    def note(self) -> str:
        """A sentence if a link is slower here than it was asked to be, else empty."""
        slow = [host for host in range(len(self.asked)) if self.measured[host] < REACHED * self.asked[host]]
        if not slow:
            return ""
        worst = min(slow, key=lambda host: self.measured[host] / self.asked[host])
        return (
            f"link: {host_name(worst)} reached {format_bit_rate(self.measured[worst])} of "
            f"{format_bit_rate(self.asked[worst])} when all hosts sent at once: this machine cannot carry more"
        )

    @property
    def line(self) -> str:
        """For the terminal: the slowest and the fastest link; or the note, if there is one."""
        rates = dict.fromkeys(format_bit_rate(rate) for rate in (min(self.measured), max(self.measured)))
        return self.note or f"links carried {' to '.join(rates)} when all hosts sent at once"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "note": self.note}


def measure_links(cluster: EmulatedCluster, seconds: float = _CHECK_SECONDS) -> LinkCheck:
    """All hosts send at once, each to the next one, over plain sockets. One host alone has nothing to check."""
    hosts = range(cluster.num_hosts)
    following = [cluster.links[(host + 1) % cluster.num_hosts] for host in hosts]
    asked = [min(pair) for pair in zip(cluster.links, following, strict=True)]
    if cluster.num_hosts == 1:
        return LinkCheck(asked, asked)
    floods = []
    for host in hosts:
        target = cluster.address((host + 1) % cluster.num_hosts)
        floods.append(cluster.call(host, _flood, target, seconds, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    for flood in floods:  # every host listens before any of them sends
        assert flood.stdout is not None
        flood.stdout.readline()
    for flood in floods:
        assert flood.stdin is not None
        flood.stdin.close()
    received = [flood.result(2 * _PATIENCE_SECONDS + seconds) for flood in floods]
    for flood in floods:
        flood.close()
    return LinkCheck(asked, [received[(host + 1) % cluster.num_hosts] for host in hosts])


def _flood(target: str, seconds: float) -> float:
    """A host's part: send to the next host and receive from the previous one, at full speed; the rate that arrived.

    Prints a line when it listens, and begins when its standard input ends.
    """
    with socket.create_server(("", _PORT)) as server:
        server.settimeout(_PATIENCE_SECONDS)
        print("listening", flush=True)
        sys.stdin.read()
        sender = threading.Thread(target=_send, args=(target, seconds), daemon=True)
        sender.start()
        try:
            connection, _ = server.accept()
            with connection:
                return receiving_rate(connection)
        except OSError:
            return 0.0
        finally:
            sender.join()


def _send(target: str, seconds: float) -> None:
    data = bytes(_CHUNK_BYTES)
    with socket.create_connection((target, _PORT), timeout=_PATIENCE_SECONDS) as connection:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            connection.sendall(data)


def receiving_rate(connection: socket.socket) -> float:
    """Bits per second between the moments at which a tenth and nine tenths had arrived: without start and end."""
    connection.settimeout(_PATIENCE_SECONDS)
    buffer = bytearray(_CHUNK_BYTES)
    arrivals: list[tuple[float, int]] = []
    total = 0
    while count := connection.recv_into(buffer):
        total += count
        arrivals.append((time.monotonic(), total))
    middle = [(moment, count) for moment, count in arrivals if total / 10 <= count <= total * 9 / 10]
    if len(middle) < 2:
        return 0.0
    return (middle[-1][1] - middle[0][1]) * 8 / (middle[-1][0] - middle[0][0])
