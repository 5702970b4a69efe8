"""What the links of a cluster are: each host's rate, and how it is enforced. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from syncline.errors import UsageError
from syncline.units import format_bit_rate, parse_rate

MOST_HOSTS = 64
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
    """'1gbit' for all hosts, or one rate a host with commas between; bits per second."""
    if not 1 <= hosts <= MOST_HOSTS:
        raise UsageError(f"{hosts} hosts cannot be emulated.", action=f"Take 1 to {MOST_HOSTS}.")
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


def check_rate(bits_per_s: float) -> None:
    if not _SLOWEST_BITS_PER_S <= bits_per_s <= _FASTEST_BITS_PER_S:
        raise UsageError(
            f"a link of {format_bit_rate(bits_per_s)} cannot be emulated.",
            action=f"Take {format_bit_rate(_SLOWEST_BITS_PER_S)} to {format_bit_rate(_FASTEST_BITS_PER_S)}.",
        )


def host_name(host: int) -> str:
    return f"host{host}"


def host_address(host: int) -> str:
    return f"10.0.{host // 250}.{host % 250 + 1}"


PREFIX_LENGTH = 16
INTERFACE = "eth0"
"""The name of the link on each host."""
