"""A network cable with a length: ``cable.py HOST_PID SWITCH_PID PORT DELAY_MS`` joins a host's eth0 to a switch's port.

Both ends are TAP devices that live as long as this process. Each frame is held for the delay, one way. A line on
standard input is a new delay in ms.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import struct
import sys
import time

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_PI, _VNET_HDR = 2, 0x1000, 0x4000
_ALL_OFFLOADS = 7  # frames of 64 kB instead of 1500 bytes: what makes a cable in Python fast


def tap(pid: int, name: str) -> int:
    """A TAP device in the network namespace of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(namespace)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_PI | _VNET_HDR))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _ALL_OFFLOADS)
    return device


def main() -> None:
    """Carry frames until killed."""
    host_pid, switch_pid, port, delay_ms = sys.argv[1:]
    delay_s = float(delay_ms) / 1000
    ends = (tap(int(host_pid), "eth0"), tap(int(switch_pid), port))
    other = dict(zip(ends, reversed(ends), strict=True))
    on_the_way: list[tuple[float, int, int, bytes]] = []
    count = 0
    watched = [*ends, 0]
    while True:
        wait_s = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        for fd in select.select(watched, [], [], wait_s)[0]:
            data = b""
            try:
                data = os.read(fd, 70000)
            except OSError:  # nothing there just now, or the device is down
                continue
            if fd in other:
                count += 1
                heapq.heappush(on_the_way, (time.monotonic() + delay_s, count, other[fd], data))
            elif data:
                delay_s = float(data.split()[-1]) / 1000
            else:
                watched.remove(fd)
        now = time.monotonic()
        while on_the_way and on_the_way[0][0] <= now:
            _, _, end, data = heapq.heappop(on_the_way)
            try:
                os.write(end, data)
            except OSError:  # down, or full: a cable loses frames then
                pass


if __name__ == "__main__":
    main()
