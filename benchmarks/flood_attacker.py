"""The stranger of `benchmarks.flooding`: `python -m benchmarks.flood_attacker KIND PORT…`. It starts without torch.

Prints the number of its connections, after the first and after each hundred.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress

CONNECTIONS = 10_000
HELD = 4_000
"""Connections that the attacker keeps open at once; beyond that, it closes the oldest."""
HOST, OTHER_HOST = "127.0.0.1", "127.0.0.66"
OPENING_BYTES = 32
LIFE_SECONDS = 120.0


def connect(kind: str, port: int) -> socket.socket:
    """Make one connection, and send what this kind of attack sends."""
    sock, opening = socket.socket(), os.urandom(OPENING_BYTES)
    sock.settimeout(0.5)
    with suppress(OSError):
        sock.bind((HOST if kind == "other" else OTHER_HOST, 0))
        sock.connect((HOST, port))
        if kind == "half":
            sock.send(opening[: OPENING_BYTES // 2])
        for byte in opening if kind == "drops" else b"":
            sock.send(bytes((byte,)))
    return sock


def own_port() -> int:
    """A port of this process, which takes and closes connections as a listener of a peer does."""
    listening = socket.create_server((HOST, 0), backlog=128)

    def accept() -> None:
        while True:
            listening.accept()[0].close()

    threading.Thread(target=accept, daemon=True).start()
    return int(listening.getsockname()[1])


def main(kind: str, ports: list[int]) -> None:
    os.nice(19)
    ports = [own_port()] if kind == "elsewhere" else ports
    held: deque[socket.socket] = deque()
    for number in range(CONNECTIONS):
        held.append(connect(kind, ports[number % len(ports)]))
        if len(held) > HELD:
            held.popleft().close()
        if number % 100 == 0:
            print(number + 1, flush=True)
    time.sleep(LIFE_SECONDS)  # hold them; the benchmark ends this process


if __name__ == "__main__":
    main(sys.argv[1], [int(port) for port in sys.argv[2:]])
