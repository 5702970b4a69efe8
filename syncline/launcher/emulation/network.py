"""The bridge and the shaped links, as the switch process holds them in its own network namespace.

Each link is a pair of virtual cards. What a host sends is shaped on its own card, what it receives on the bridge's
side, so both directions have the rate. Packets are large inside the kernel, as with the offloading of a real card,
and their headers count as if each frame had its own.
"""

from __future__ import annotations

import os
from typing import Any

from pyroute2 import IPRoute  # type: ignore[import-untyped]

from syncline.launcher.emulation.links import INTERFACE, PREFIX_LENGTH, host_address, shape_of
from syncline.launcher.emulation.namespaces import enter_network, quieten_ipv6

_BRIDGE = "bridge"
_ROOT_HANDLE = 0x10000


class Network:
    """Made inside the switch's network namespace. `hosts` are descriptors of the hosts' network namespaces."""

    def __init__(self, hosts: list[int], rates: list[float]) -> None:
        own = os.open("/proc/self/ns/net", os.O_RDONLY)
        quieten_ipv6()
        self._switch: Any = IPRoute()
        self._hosts: list[Any] = []
        self._ports: list[int] = []
        self._cards: list[int] = []
        bridge = self._add(_BRIDGE, kind="bridge", br_mcast_snooping=0)
        for host, (namespace, rate) in enumerate(zip(hosts, rates, strict=True)):
            self._hosts.append(_routes_in(namespace, own))
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
        routes.addr("add", index=card, address=host_address(host), prefixlen=PREFIX_LENGTH)
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


def _routes_in(namespace: int, own: int) -> Any:
    """Sockets belong to the namespace that they were made in, also after we have left it."""
    enter_network(namespace)
    try:
        return IPRoute()
    finally:
        enter_network(own)
