"""One end of a channel: frames over a socket that does not block. Standard library only."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Sequence

from atoll.wire.event_loop import EventLoop
from atoll.wire.frames import Parser, RawFrame, WireError, close_all, receive, send_some

_DRAIN_READS = 32  # of what lies in a channel that is given up: who writes without end must not hold it up
Ended = Callable[[OSError | WireError | None], object]


def said_of_end(error: OSError | WireError | None) -> str:
    """Why a channel to an agent ended, where nobody knows better."""
    return "its agent ended" if error is None else f"its channel broke: {error}"


class Sender:
    """Sends frames without ever waiting: what the socket does not take at once waits, in order.

    Args:
        sock: its owner closes it.
        loop: watches it for ``flush``, once its owner does.
        lock: held while frames are sent, where several threads do.

    Attributes:
        num_bytes: how much waits.
    """

    def __init__(
        self, sock: socket.socket, loop: EventLoop, lock: contextlib.AbstractContextManager[object] | None = None
    ) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.parser = Parser()  # of what is read
        self.num_bytes = 0
        self._fd = sock.fileno()
        self._loop = loop
        self._lock = lock or contextlib.nullcontext()
        self._waiting: deque[tuple[bytes | memoryview, Sequence[int]]] = deque()
        self._is_sending = self._is_closed = False

    def send(self, data: bytes | memoryview, fds: Sequence[int] = ()) -> None:
        """Send a frame, now or when the other side reads; its descriptors are closed once they are sent."""
        with self._lock:
            if self._is_closed:
                close_all(fds)
                return
            self._waiting.append((data, fds))
            self.num_bytes += len(data)
            if len(self._waiting) == 1:  # else it waits its turn
                self.flush()

    def flush(self) -> None:
        """Send what the socket takes now. Does nothing in the middle of itself, as a signal handler's may be."""
        with self._lock:
            if self._is_sending:
                return
            self._is_sending = True
            try:
                self._flush()
            except OSError:  # the other side is gone, which who reads sees
                self._clear()
            finally:
                self._is_sending = False
            self._loop.want_write(self._fd, bool(self._waiting))

    def _flush(self) -> None:
        while self._waiting:
            data, fds = self._waiting[0]
            try:
                sent = send_some(self.sock, data, fds)
            except BlockingIOError:
                return
            close_all(fds)
            self.num_bytes -= sent
            self._waiting.popleft()
            if sent < len(data):
                self._waiting.appendleft((memoryview(data)[sent:], ()))

    def _clear(self) -> None:
        for _data, fds in self._waiting:
            close_all(fds)
        self._waiting.clear()
        self.num_bytes = 0

    def close(self) -> None:
        """Forget it, and what waits."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.unwatch(self._fd)
            self.parser.close()
            self._clear()


class Channel(Sender):
    """Reads frames, too, whenever its loop finds some.

    Args:
        sock, loop, lock: as above.
        frame: gets every frame that comes, and its descriptors.
        ended: is told once that the channel is at its end, and the error that it ended with, if any.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: EventLoop,
        frame: Callable[[RawFrame], object],
        ended: Ended,
        lock: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        super().__init__(sock, loop, lock)
        self._frame = frame
        self._ended = ended
        self._found: deque[RawFrame] = deque()
        loop.watch(self._fd, self._ready)

    def _ready(self, readable: bool, writable: bool) -> None:
        if writable:
            self.flush()
        if readable:
            self.read()

    def read(self) -> bool:
        """Hand on the frames that one read gives; may there be more?"""
        if self._is_closed:
            return False
        try:
            data, fds = receive(self.sock)
            self._found.extend(self.parser.feed(data, fds))
        except BlockingIOError:
            return False
        except (OSError, WireError) as error:
            return self._end(error)
        self._hand_on()
        return bool(data) or self._end(None)

    def drain(self) -> None:
        """Hand on what there is to read now; its end is of no interest any more."""
        self._ended = lambda error: None
        self._hand_on()  # where this is called for a frame, those that came after it
        for _ in range(_DRAIN_READS):
            if not self.read():
                break

    def _hand_on(self) -> None:
        while self._found:
            self._frame(self._found.popleft())

    def _end(self, error: OSError | WireError | None) -> bool:
        with self._lock:  # who sends in another thread must not ask the loop for what is no longer there
            self._loop.unwatch(self._fd)
        self._ended(error)
        return False

    def close(self) -> None:
        """Forget it, and what was not handed on."""
        for frame in self._found:
            close_all(frame.fds)
        self._found.clear()
        super().close()
