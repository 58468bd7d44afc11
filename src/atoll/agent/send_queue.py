"""Frames on their way into a socket that does not always take them at once."""

from __future__ import annotations

import socket
from collections import deque

from atoll.wire.frames import close_all, send_some


class Outbox:
    """What waits for a socket that doesn't block, in order.

    Attributes:
        num_bytes: how much waits.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._waiting: deque[tuple[bytes | memoryview, tuple[int, ...]]] = deque()
        self._is_sending = False
        self.num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, data: bytes, fds: tuple[int, ...]) -> bool:
        """Put something last; the descriptors are closed once they are sent. Says whether it is the first, too."""
        self._waiting.append((data, fds))
        self.num_bytes += len(data)
        return len(self._waiting) == 1

    def flush(self) -> None:
        """Send what the socket takes now. Does nothing in the middle of itself, as a signal handler's may be.

        Raises:
            OSError: the other side is gone.
        """
        if self._is_sending:
            return
        self._is_sending = True
        try:
            self._send()
        finally:
            self._is_sending = False

    def _send(self) -> None:
        while self._waiting:
            data, fds = self._waiting[0]
            try:
                sent = send_some(self._sock, data, fds)
            except BlockingIOError:
                return
            close_all(fds)
            self.num_bytes -= sent
            self._waiting.popleft()
            if sent < len(data):
                self._waiting.appendleft((memoryview(data)[sent:], ()))

    def clear(self) -> None:
        """Drop what waits."""
        for _data, fds in self._waiting:
            close_all(fds)
        self._waiting.clear()
        self.num_bytes = 0
