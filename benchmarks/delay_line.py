"""A delay line for the packets of a router: a TUN device whose other end holds each packet for a while.

The kernel of these machines may lack netem. So the router sends all packets that it forwards into the device; this
process returns each of them later, and the router delivers it. TCP runs end to end, as on a long link.

    python -m benchmarks.delay_line --seconds 0.05 line2 line3     on the router, until it is ended

Prints "up" when packets are delayed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000
_DEVICE, _TABLE = "delay", "100"
_MOST_PACKETS = 200_000
_FRAME_BYTES = 65_536
_BATCH = 64


def open_device() -> int:
    """Open the TUN device; it exists as long as it is open."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    return file


def route(lines: list[str]) -> None:
    """Send into the device what comes from these lines; what comes out of it takes the usual way."""
    for setting in ("all", _DEVICE):
        with open(f"/proc/sys/net/ipv4/conf/{setting}/rp_filter", "w") as file:
            file.write("0")
    commands = [f"ip link set {_DEVICE} up txqueuelen 10000", f"ip route add default dev {_DEVICE} table {_TABLE}"]
    commands += [f"ip rule add iif {line} lookup {_TABLE}" for line in lines]
    for command in commands:
        subprocess.run(command.split(), check=True, timeout=10)


def run(file: int, seconds: float) -> None:
    """Delay packets until the process is ended. Beyond 200,000 waiting packets, new ones are lost."""
    waiting: deque[tuple[float, bytes]] = deque()
    poll = select.poll()
    poll.register(file, select.POLLIN)
    while True:
        pause = 1000.0 if not waiting else max(0.0, 1000 * (waiting[0][0] - time.monotonic()))
        poll.poll(pause)
        now = time.monotonic()
        for _ in range(_BATCH):
            try:
                packet = os.read(file, _FRAME_BYTES)
            except BlockingIOError:
                break
            if len(waiting) < _MOST_PACKETS:
                waiting.append((now + seconds, packet))
        while waiting and waiting[0][0] <= now:
            os.write(file, waiting.popleft()[1])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delay_line")
    parser.add_argument("lines", nargs="+")
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    file = open_device()
    route(options.lines)
    print("up", flush=True)
    run(file, options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
