"""The way to the rendezvous host: its address, and the address and interface of this machine that lead there.

Gloo left alone binds to whatever the hostname resolves to; on many machines that is a slow or a dead interface.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from syncline.errors import UsageError


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
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"the rendezvous host {host!r} has no address here: {error.strerror}.",
            action="Correct the name, or give the address of node 0.",
        ) from None
    addresses = sorted((str(entry[4][0]) for entry in found), key=lambda address: ":" in address)
    address = addresses[0]
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback and host not in (address, "localhost"):
        # Debian's /etc/hosts gives a machine's own name the address 127.0.1.1, where no other machine can reach it.
        raise UsageError(
            f"the rendezvous host {host!r} is {address} here, which other nodes cannot reach.",
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
                action="Correct --rendezvous, or connect the machine.",
            ) from None
        return str(asking.getsockname()[0])


def interface_of(address: str) -> str:
    """The network interface that has this address."""
    # Late, because it is slow to load and only nodes need it.
    from pyroute2 import IPRoute  # type: ignore[import-untyped]

    with IPRoute() as kernel:
        for entry in kernel.get_addr():
            known = dict(entry["attrs"])
            if address in (known.get("IFA_LOCAL"), known.get("IFA_ADDRESS")):
                return socket.if_indextoname(entry["index"])
    if ipaddress.ip_address(address).is_loopback:  # all of 127.0.0.0/8, of which only 127.0.0.1 is listed
        return "lo"
    raise UsageError(f"no network interface has the address {address}.", action="Set GLOO_SOCKET_IFNAME.")


def _suggestion() -> str:
    try:
        return f", perhaps {local_address('192.0.2.1', 9)}"
    except UsageError:
        return ""
