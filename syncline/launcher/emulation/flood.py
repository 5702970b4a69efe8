"""A host's part in the check of all links: send to the next host, receive from the previous one, at full speed.

Prints a line when it listens, begins when its standard input ends, and prints the rate that arrived as JSON.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

_PORT = 29499
_CHUNK_BYTES = 1 << 18
_TIMEOUT_S = 20.0


def main(arguments: list[str]) -> None:
    target, seconds = arguments[0], float(arguments[1])
    with socket.create_server(("", _PORT)) as server:
        server.settimeout(_TIMEOUT_S)
        print("listening", flush=True)
        sys.stdin.read()
        sender = threading.Thread(target=_send, args=(target, seconds), daemon=True)
        sender.start()
        connection, _ = server.accept()
        with connection:
            rate = receiving_rate(connection)
        sender.join()
    print(json.dumps({"bits_per_s": rate}))


def _send(target: str, seconds: float) -> None:
    data = bytes(_CHUNK_BYTES)
    with socket.create_connection((target, _PORT), timeout=_TIMEOUT_S) as connection:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            connection.sendall(data)


def receiving_rate(connection: socket.socket) -> float:
    """Bits per second between the moments at which a tenth and nine tenths had arrived: without start and end."""
    connection.settimeout(_TIMEOUT_S)
    buffer = bytearray(_CHUNK_BYTES)
    seen: list[tuple[float, int]] = []
    total = 0
    while count := connection.recv_into(buffer):
        total += count
        seen.append((time.monotonic(), total))
    middle = [one for one in seen if total / 10 <= one[1] <= total * 9 / 10]
    if len(middle) < 2:
        return 0.0
    return (middle[-1][1] - middle[0][1]) * 8 / (middle[-1][0] - middle[0][0])
