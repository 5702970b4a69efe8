"""The links of a cluster: their rates, how the kernel enforces them, and the bridge that joins them.

Each link is a pair of virtual cards. What a host sends is shaped on its own card, what it receives on the bridge's
side, so both directions have the rate. Packets are large inside the kernel, as with the offloading of a real card,
and their headers count as if each frame had its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from syncline.errors import UsageError
from syncline.launcher.emulation.namespaces import enter_network, quieten_ipv6
from syncline.units import format_bit_rate, parse_rate

MOST_HOSTS = 64
INTERFACE = "eth0"
"""The name of the link on each host."""
_PREFIX_LENGTH = 16
_BRIDGE = "bridge"
_ROOT_HANDLE = 0x10000
_SLOWEST_BITS_PER_S = 1e5
_FASTEST_BITS_PER_S = 34e9  # the kernel's tbf counts bytes per second in 32 bits here
_BURST_S = 0.0005
_QUEUE_S = 0.05
_FRAME_BYTES = 1514
_WITH_HEADERS = 1.06  # the kernel counts a header for each frame that a packet will be cut into
_LARGEST_PACKET_BYTES = 65536


@dataclass(frozen=True)
class Shape:
    """Parameters of a token bucket, in bytes."""

    bytes_per_s: int
    packet: int
    """Largest packet that the host hands to its link in one piece; the stack cuts it into frames as a card would."""
    burst: int
    """Passes at once after a pause."""
    queue: int
    """Waits before packets are dropped, as in a switch."""


def shape_of(bits_per_s: float) -> Shape:
    """Half a millisecond of burst: what passes for free after a pause stays small beside any transfer that matters.

    Packets are kept below the burst, because a bucket cuts what does not fit into frames, and then works on each.
    """
    bytes_per_s = bits_per_s / 8
    packet = round(min(_LARGEST_PACKET_BYTES, max(2 * _FRAME_BYTES, bytes_per_s * _BURST_S)))
    burst = round(max(packet * _WITH_HEADERS + _FRAME_BYTES, bytes_per_s * _BURST_S))
    queue = round(max(bytes_per_s * _QUEUE_S, 64 * _FRAME_BYTES)) + burst
    return Shape(round(bytes_per_s), packet, burst, queue)


def parse_links(text: str, hosts: int) -> list[float]:
    """'1gbit' for all hosts, or '1gbit,100mbit', one rate for each host; in bits per second."""
    check_hosts(hosts)
    rates = [parse_rate(part) for part in text.split(",")]
    if len(rates) == 1:
        rates *= hosts
    if len(rates) != hosts:
        raise UsageError(
            f"--link gives {len(rates)} rates for {hosts} hosts.", action="Give one rate, or one for each host."
        )
    for rate in rates:
        check_rate(rate)
    return rates


def check_hosts(hosts: int) -> None:
    if not 1 <= hosts <= MOST_HOSTS:
        raise UsageError(f"cannot emulate {hosts} hosts.", action=f"Choose 1 to {MOST_HOSTS}.")


def check_rate(bits_per_s: float) -> None:
    if not _SLOWEST_BITS_PER_S <= bits_per_s <= _FASTEST_BITS_PER_S:
        raise UsageError(
            f"cannot emulate a link of {format_bit_rate(bits_per_s)}.",
            action=f"Choose {format_bit_rate(_SLOWEST_BITS_PER_S)} to {format_bit_rate(_FASTEST_BITS_PER_S)}.",
        )


def host_name(host: int) -> str:
    return f"host{host}"


def host_address(host: int) -> str:
    return f"10.0.{host // 250}.{host % 250 + 1}"


class Network:
    """Made inside the switch's network namespace. `hosts` are descriptors of the hosts' network namespaces."""

    def __init__(self, hosts: list[int], rates: list[float]) -> None:
        from pyroute2 import IPRoute  # type: ignore[import-untyped]  # only here: nobody else needs it

        own = os.open("/proc/self/ns/net", os.O_RDONLY)
        quieten_ipv6()
        self._switch: Any = IPRoute()
        self._hosts: list[Any] = []
        self._ports: list[int] = []
        self._cards: list[int] = []
        bridge = self._add(_BRIDGE, kind="bridge", br_mcast_snooping=0)
        for host, (namespace, rate) in enumerate(zip(hosts, rates, strict=True)):
            # Sockets belong to the namespace that they were made in, also after we have left it.
            enter_network(namespace)
            try:
                self._hosts.append(IPRoute())
            finally:
                enter_network(own)
            self._connect(host, namespace, bridge)
            self.set_rate(host, rate)
        os.close(own)

    def set_rate(self, host: int, bits_per_s: float) -> None:
        """Both directions of a host's link, also while it is in use."""
        shape = shape_of(bits_per_s)
        for routes, index in ((self._switch, self._ports[host]), (self._hosts[host], self._cards[host])):
            routes.link("set", index=index, gso_max_size=shape.packet)
            routes.tc(
                "replace", "tbf", index=index, handle=_ROOT_HANDLE,
                rate=shape.bytes_per_s, burst=shape.burst, limit=shape.queue, latency=0,
            )  # fmt: skip

    def set_connected(self, host: int, connected: bool) -> None:
        """Pull or plug the cable at the switch: the host sees its carrier go and come."""
        self._switch.link("set", index=self._ports[host], state="up" if connected else "down")

    def counters(self, host: int) -> dict[str, int]:
        """What the host has sent and received over its link since it was made."""
        (link,) = self._hosts[host].get_links(self._cards[host])
        counted = link.get("stats64") or link.get("stats")
        return {
            "sent_bytes": counted["tx_bytes"],
            "received_bytes": counted["rx_bytes"],
            "dropped_packets": counted["tx_dropped"] + counted["rx_dropped"],
        }

    def _connect(self, host: int, namespace: int, bridge: int) -> None:
        routes = self._hosts[host]
        peer = {"ifname": INTERFACE, "net_ns_fd": namespace}
        port = self._add(f"port{host}", kind="veth", peer=peer, master=bridge)
        (card,) = routes.link_lookup(ifname=INTERFACE)
        routes.addr("add", index=card, address=host_address(host), prefixlen=_PREFIX_LENGTH)
        routes.link("set", index=card, state="up")
        (loopback,) = routes.link_lookup(ifname="lo")
        routes.link("set", index=loopback, state="up")
        self._ports.append(port)
        self._cards.append(card)

    def _add(self, name: str, **options: Any) -> int:
        self._switch.link("add", ifname=name, **options)
        (index,) = self._switch.link_lookup(ifname=name)
        self._switch.link("set", index=index, state="up")
        return int(index)
