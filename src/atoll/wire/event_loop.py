"""The event loop of every driver and agent: descriptors, timers, and calls from other threads. Standard library only.

As ``selectors`` and ``asyncio``, without what those do around each wait: this is on every call's path.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

Ready = Callable[[bool, bool], object]  # can it be read, or has it ended? can it be written?
READ = 1
WRITE = 4
LONGEST_S = 1e6  # what the system call takes


class EventLoop:
    """Runs in one thread; only ``post`` and ``wake`` may be called from others, and from signal handlers.

    Attributes:
        poll, modify: as ``select.epoll``'s, for what is on every call's path.
        watched: the callback of each descriptor.
    """

    def __init__(self) -> None:
        self._poll = select.epoll()
        self.poll, self.modify = self._poll.poll, self._poll.modify
        self.watched: dict[int, Ready] = {}
        self._masks: dict[int, int] = {}
        self._timers: dict[object, tuple[float, Callable[[], object]]] = {}
        self._posted: deque[Callable[[], object]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_lock = threading.RLock()  # also a signal handler's
        self.watch(self._wake_fd, self._woken)

    def watch(self, fd: int, ready: Ready, mask: int = READ) -> None:
        """Call ``ready`` when the descriptor can be read, or as ``mask`` says; always when it has ended."""
        if fd not in self.watched:
            self._poll.register(fd, mask)
        elif mask != self._masks[fd]:
            self._poll.modify(fd, mask)
        self.watched[fd], self._masks[fd] = ready, mask

    def want_write(self, fd: int, wanted: bool) -> None:
        """Call it also when the descriptor can be written, or no longer."""
        mask = self._masks.get(fd)
        if mask is not None and wanted != (mask & WRITE != 0):
            self._masks[fd] = mask ^ WRITE
            self._poll.modify(fd, mask ^ WRITE)

    def unwatch(self, fd: int) -> None:
        """Forget the descriptor; does nothing where it is not watched."""
        if self.watched.pop(fd, None) is not None:
            del self._masks[fd]
            with contextlib.suppress(OSError):  # one that was closed is forgotten already
                self._poll.unregister(fd)

    def after(self, delay_s: float, action: Callable[[], object], name: str | None = None) -> None:
        """Act once after a while; a timer of the same name is replaced."""
        self._timers[name or object()] = time.monotonic() + delay_s, action

    def cancel(self, name: str) -> None:
        """Drop a timer."""
        self._timers.pop(name, None)

    def post(self, call: Callable[[], object]) -> None:
        """Have something called in the loop's thread."""
        self._posted.append(call)
        self.wake()

    def wake(self) -> None:
        """Have the wait end; does nothing where the loop is closed."""
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def turn(self, timeout_s: float | None = None) -> None:
        """Wait for the next thing, at most so long, and handle everything that is due."""
        wait_s = LONGEST_S if timeout_s is None else min(timeout_s, LONGEST_S)
        if self._timers:
            wait_s = min(wait_s, min(when for when, _ in self._timers.values()) - time.monotonic())
        ready = self._poll.poll(max(0.0, wait_s))
        for fd, callback, events in [(fd, self.watched.get(fd), events) for fd, events in ready]:
            # One that an earlier callback has closed may have become another one's.
            if callback is not None and self.watched.get(fd) is callback:
                callback(events & ~WRITE != 0, events & WRITE != 0)
        if self._timers:
            now = time.monotonic()
            for name, timer in list(self._timers.items()):
                if timer[0] <= now and self._timers.get(name) is timer:
                    del self._timers[name]
                    timer[1]()
        while self._posted:
            self._posted.popleft()()

    def close(self) -> None:
        """Forget everything."""
        self.watched.clear()
        self._timers.clear()
        self._poll.close()
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _woken(self, _readable: bool, _writable: bool) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
