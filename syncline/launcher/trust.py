"""Who is at the other end of a connection: proofs of a secret that is never sent, and the user of a local socket."""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path

_PEER = struct.Struct("3i")
"""SO_PEERCRED: process, user, group. The process is that of another namespace where there are several."""
_TABLES = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}


def proof(secret: str, *facts: object) -> str:
    """What only a holder of the secret can say about these facts. They hold a random number from each side, so it is
    of no use a second time, and say who speaks, so it cannot be sent back."""
    return hmac.new(secret.encode(), "\0".join(map(str, facts)).encode(errors="replace"), "sha256").hexdigest()


def is_proof(given: object, secret: str, *facts: object) -> bool:
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, proof(secret, *facts))


def is_loopback(address: str) -> bool:
    """Whether this is an address within this machine."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_same_user(connected: socket.socket) -> bool:
    """Whether the other end is on this machine and belongs to this process's user, as the kernel says."""
    try:
        if connected.family == socket.AF_UNIX:
            peer = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            return bool(_PEER.unpack(peer)[1] == os.geteuid())
        ours, theirs = connected.getsockname(), connected.getpeername()
        if not is_loopback(theirs[0]):
            return False
        # The other end is a line of the same table, with the addresses the other way round.
        ends = [_in_table(theirs), _in_table(ours)]
        lines = (line.split() for line in _TABLES[connected.family].read_text().splitlines()[1:])
        return any(line[1:3] == ends and line[7] == str(os.geteuid()) for line in lines)
    except (OSError, KeyError, IndexError, ValueError):
        return False


def _in_table(end: tuple[str, int]) -> str:
    """An address and a port as the kernel prints them: words of four bytes in the machine's order."""
    packed = ipaddress.ip_address(end[0]).packed
    words = [int.from_bytes(packed[start : start + 4], sys.byteorder) for start in range(0, len(packed), 4)]
    return f"{''.join(f'{word:08X}' for word in words)}:{end[1]:04X}"
