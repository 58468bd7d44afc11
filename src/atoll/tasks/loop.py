"""The supervisor's loop: one thread waits for descriptors, and for what others post. Standard library only."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Callable

from atoll.wire.poller import Poller

Ready = Callable[[bool, bool], None]  # can it be read, can it be written?


class Loop:
    """Descriptors with their callbacks, and calls posted from other threads."""

    def __init__(self) -> None:
        self._poller: Poller[Ready] = Poller()
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_read, self.wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poller.watch(self._wake_read, self._woken)

    def watch(self, fd: int, ready: Ready) -> None:
        """Call ``ready`` when the descriptor can be read, or has ended."""
        self._poller.watch(fd, ready)

    def want_write(self, fd: int, wanted: bool) -> None:
        """Call it also when the descriptor can be written, or no longer."""
        self._poller.want_write(fd, wanted)

    def unwatch(self, fd: int) -> None:
        """Forget the descriptor."""
        self._poller.unwatch(fd)

    def post(self, call: Callable[[], None]) -> None:
        """Have it called in the loop's thread. From any thread."""
        self._posted.put(call)
        with contextlib.suppress(BlockingIOError):  # full: it wakes as it is
            os.write(self.wake_write, b"!")

    def turn(self, timeout_s: float | None) -> None:
        """Wait until something happens or the time is over, and see to it."""
        for ready, readable, writable in self._poller.wait(timeout_s):
            ready(readable, writable)
        while not self._posted.empty():
            self._posted.get()()

    def close(self) -> None:
        """Give up its descriptors."""
        self._poller.close()
        os.close(self._wake_read)
        os.close(self.wake_write)

    def _woken(self, _readable: bool, _writable: bool) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)


class GuardedLoop:
    """A loop as one of its users sees it, who is told of every error that his callbacks raise."""

    def __init__(self, loop: Loop, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._loop = loop
        self.unwatch, self.want_write = loop.unwatch, loop.want_write

    def guard(self, call: Callable[[], None]) -> None:
        """Call it, now."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a user's error is no reason to end the others
            self._failed(error)

    def watch(self, fd: int, ready: Ready) -> None:
        """As ``Loop.watch``."""
        self._loop.watch(fd, lambda readable, writable: self.guard(lambda: ready(readable, writable)))

    def post(self, call: Callable[[], None]) -> None:
        """As ``Loop.post``."""
        self._loop.post(lambda: self.guard(call))
