"""The supervisor's end of a channel to a node's agent. Standard library only."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

from atoll.providers.base import Node
from atoll.tasks.loop import GuardedLoop
from atoll.wire.frames import Parser, RawFrame, WireError, receive, send_some

_READS = 32  # of one node, before others get their turn


class Channel:
    """Sends frames to an agent without ever waiting, and hands on those it sends.

    Args:
        loop: the supervisor's, as the job sees it.
        node: what was started.
        frame: gets every frame.
        lost: is told once, with the reason, when the channel is at its end.
    """

    def __init__(
        self, loop: GuardedLoop, node: Node, frame: Callable[[RawFrame], None], lost: Callable[[str], None]
    ) -> None:
        self._loop = loop
        self._node = node
        self._sock = node.channel
        self._sock.setblocking(False)
        self._fd = self._sock.fileno()
        self._frame = frame
        self._lost = lost
        self._parser = Parser()
        self._found: deque[RawFrame] = deque()
        self._out: deque[bytes] = deque()
        self._closed = False
        loop.watch(self._fd, self._ready)

    def send(self, data: bytes) -> None:
        """Send a frame, now or when the agent reads."""
        self._out.append(data)
        if len(self._out) == 1:
            self._flush()

    def drain(self) -> None:
        """Hand on what there is to read now; its end is of no interest any more."""
        self._lost = lambda reason: None
        self._hand_on()  # where this is called for a frame, those that came after it
        for _ in range(_READS):
            if not self._read():
                break

    def close(self) -> None:
        """Stop watching; the channel itself is the node's."""
        if not self._closed:
            self._closed = True
            self._loop.unwatch(self._fd)
            self._parser.close()

    def _ready(self, readable: bool, writable: bool) -> None:
        if writable:
            self._flush()
        if readable:
            for _ in range(_READS):
                if not self._read():
                    break

    def _read(self) -> bool:
        """Take what one read gives; is there perhaps more?"""
        if self._closed:
            return False
        try:
            data, fds = receive(self._sock)
            self._found.extend(self._parser.feed(data, fds))
        except BlockingIOError:
            return False
        except (OSError, WireError) as error:
            return self._end(str(error))
        if not data:
            return self._end("its agent ended")
        self._hand_on()
        return True

    def _hand_on(self) -> None:
        while self._found:
            frame = self._found.popleft()
            for fd in frame.fds:  # no agent of a task sends any
                os.close(fd)
            if not self._closed:
                self._frame(frame)

    def _end(self, what: str) -> bool:
        self.close()
        self._lost(self._node.reason or what)
        return False

    def _flush(self) -> None:
        while self._out and not self._closed:
            try:
                sent = send_some(self._sock, self._out[0])
            except BlockingIOError:
                break
            except OSError:  # its end is read as well
                self._out.clear()
                break
            data = self._out.popleft()
            if sent < len(data):
                self._out.appendleft(data[sent:])
        self._loop.want_write(self._fd, bool(self._out))
