"""Where ranks meet that a scheduler or mpiexec has started without saying where.

All ranks must find the same place by themselves: on one host, loopback; under Slurm, the first host of the step; the
port follows from the job's id, so that two jobs on one machine do not meet.
"""

from __future__ import annotations

import socket
import zlib
from dataclasses import dataclass

from syncline.errors import UsageError
from syncline.launcher.adopt import Placement
from syncline.launcher.nodes.route import interface_of, local_address
from syncline.launcher.starting import LOOPBACK, listening

_FIRST_PORT, _NUM_PORTS = 20_000, 12_000
"""Below the ports that systems give to outgoing connections."""


@dataclass(frozen=True)
class Meeting:
    address: str
    port: int

    def listen(self) -> socket.socket:
        """For rank 0. Where its own name leads to loopback, as on Debian, it listens on every interface."""
        address = resolve(self.address)
        try:
            if address.startswith("127.") and self.address != LOOPBACK:
                return listening("", self.port)
            return listening(address, self.port)
        except OSError as error:
            raise UsageError(
                f"rank 0 cannot listen at {self.address} port {self.port}: {error.strerror}.",
                action="Set MASTER_ADDR to the host of rank 0, and MASTER_PORT.",
            ) from error

    def interface(self) -> str:
        """The network interface on the way there; empty where this machine's own name hides it."""
        address = local_address(resolve(self.address), self.port)
        return "" if address.startswith("127.") and self.address != LOOPBACK else interface_of(address)


def find_meeting(place: Placement) -> Meeting | None:
    """The place that all ranks find by themselves; None if there is none to be found, or none is needed."""
    if not place.job:
        return None
    port = _FIRST_PORT + zlib.crc32(place.job.encode()) % _NUM_PORTS
    if place.num_hosts == 1:
        return Meeting(LOOPBACK, port)
    return Meeting(place.first_host, port) if place.first_host else None


def resolve(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UsageError(
            f"the first host of the job, {host!r}, has no address here: {error.strerror}.",
            action="Set MASTER_ADDR and MASTER_PORT.",
        ) from None
