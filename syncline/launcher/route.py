"""The way to node 0, and where ranks meet that a scheduler or mpiexec started without saying where.

A route is node 0's address with the address and interface of this machine that lead there: left alone, Gloo binds to
whatever the hostname resolves to, and on many machines that is a slow or a dead interface.

All ranks must find the same meeting by themselves: on one host, loopback; under Slurm, the first host of the step.
The port follows from the job's id, so that two jobs on one machine do not meet.
"""

from __future__ import annotations

import errno
import socket
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from syncline.errors import UsageError
from syncline.launcher.adopt import Placement
from syncline.launcher.starting import LOOPBACK, listening
from syncline.launcher.trust import is_loopback
from syncline.launcher.wire import Connection

_ATTEMPT_SECONDS = 3.0
_PAUSE_SECONDS = 0.2
_FIRST_LINE_SECONDS = 5.0
SILENCE_SECONDS = 30.0
"""A machine that is up refuses a port where nobody listens. One that says nothing is switched off, or something on
the way drops what is sent to that port."""
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000
"""Below the ports that systems give to outgoing connections."""

_SILENT = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT}


@dataclass(frozen=True)
class Route:
    """From this machine to the rendezvous."""

    target: str
    port: int
    address: str
    """This machine's own, on that way."""
    interface: str


def find_route(rendezvous: str) -> Route:
    """The route to `host:port`. A UsageError if the text, the name or the route is wrong."""
    host, port = parse_rendezvous(rendezvous)
    target = resolve_name(host)
    address = local_address(target, port)
    return Route(target, port, address, interface_of(address))


def parse_rendezvous(text: str) -> tuple[str, int]:
    """'node0:29500' or '[fd00::1]:29500'."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(
            f"--rendezvous {text!r} is not an address with a port.", action="Write it as HOST:PORT, e.g. node0:29500."
        )
    return host.strip("[]"), int(port)


def resolve_name(host: str) -> str:
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"cannot resolve the rendezvous host {host!r}: {error.strerror}.",
            action="Correct the name, or give the address of node 0.",
        ) from None
    addresses = sorted((str(entry[4][0]) for entry in entries), key=lambda address: ":" in address)
    address = addresses[0]
    if is_loopback(address) and host not in (address, "localhost"):
        # Debian's /etc/hosts gives a machine's own name the address 127.0.1.1, where no other machine can reach it.
        raise UsageError(
            f"the rendezvous host {host!r} resolves to {address} here, which other nodes cannot reach.",
            action=f"Give node 0's address on the cluster's network{_suggestion()}.",
        )
    return address


def local_address(target: str, port: int) -> str:
    """This machine's address on the way to the target. Connecting a UDP socket asks for a route and sends nothing."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((target, port))
        except OSError as error:
            raise UsageError(
                f"there is no route from this machine to the rendezvous host {target}: {error.strerror}.",
                action="Correct --rendezvous, or check this machine's network.",
            ) from None
        return str(asking.getsockname()[0])


def interface_of(address: str) -> str:
    """The network interface that has this address."""
    # Late, because it is slow to load and only nodes need it.
    from pyroute2 import IPRoute  # type: ignore[import-untyped]

    with IPRoute() as kernel:
        for entry in kernel.get_addr():
            addresses = dict(entry["attrs"])
            if address in (addresses.get("IFA_LOCAL"), addresses.get("IFA_ADDRESS")):
                return socket.if_indextoname(entry["index"])
    if is_loopback(address):  # all of 127.0.0.0/8, of which only 127.0.0.1 is listed
        return "lo"
    raise UsageError(f"no network interface has the address {address}.", action="Set GLOO_SOCKET_IFNAME.")


def connect(route: Route, timeout_s: float, say: Callable[[str], None]) -> Connection:
    """A connection to the rendezvous. After five seconds a line says what it waits for."""
    start = time.monotonic()
    last_refused = None
    has_said_why = False
    while True:
        try:
            connected = socket.create_connection((route.target, route.port), timeout=_ATTEMPT_SECONDS)
            return Connection(connected)
        except OSError as error:
            silent = isinstance(error, TimeoutError) or error.errno in _SILENT
            why = "no answer" if silent else (error.strerror or str(error)).lower()
        now = time.monotonic()
        if not silent:
            last_refused = now
        where = f"node 0 at {route.target} port {route.port}"
        patience = min(SILENCE_SECONDS, timeout_s) if silent else timeout_s
        if now - (start if not silent else last_refused or start) > patience:
            action = "Start node 0 on that machine with the same --rendezvous, or correct the address and the port."
            if silent:
                action = "Check that the address is right, the machine is on, and its firewall allows the port."
            raise UsageError(f"{where} could not be reached in {now - start:.0f} s: {why}.", action=action)
        if now - start > _FIRST_LINE_SECONDS and not has_said_why:
            has_said_why = True
            say(f"syncline: waiting for {where}: {why}")
        time.sleep(_PAUSE_SECONDS)


def _suggestion() -> str:
    try:
        return f", perhaps {local_address('192.0.2.1', 9)}"
    except UsageError:
        return ""


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
            f"cannot resolve the first host of the job, {host!r}: {error.strerror}.",
            action="Set MASTER_ADDR and MASTER_PORT.",
        ) from None
