"""The thread that takes what a gang's channels bring, and runs what is due later."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Protocol

from atoll.gang.members import NodeState
from atoll.gang.timers import Timer, Timers
from atoll.wire.frames import RawFrame, WireError, receive
from atoll.wire.poller import Poller


class Listener(Protocol):
    """Who hears of it, in the reader's thread."""

    def take(self, node: NodeState, received: list[RawFrame]) -> None:
        """Frames came from a node. The lock is held.

        Raises:
            WireError: they can't be its.
        """

    def is_full(self) -> bool:
        """Is nothing to be read just now? Waits a moment for that to change. The lock is not held."""

    def writable(self, node: NodeState) -> None:
        """A node's channel takes more of what waits for it. The lock is not held."""

    def lost(self, node: NodeState, reason: str) -> None:
        """A node's channel ended. The lock is not held; must not block."""

    def failed(self, error: BaseException) -> None:
        """The reader itself is at its end: whoever waits would wait for ever."""


class Reader:
    """One thread for all channels. ``lock`` is its owner's; timers' actions are run with it held."""

    def __init__(self, name: str, lock: threading.RLock, listener: Listener) -> None:
        self._lock = lock
        self._listener = listener
        self._timers = Timers()
        self._leaving = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller: Poller[NodeState | None] = Poller()
        self._poller.watch(self._wake, None)
        self._thread = threading.Thread(target=self._read, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Does this very thread do the reading?"""
        return threading.current_thread() is self._thread

    @property
    def alive(self) -> bool:
        """Does it read?"""
        return self._thread.is_alive()

    def leave(self) -> None:
        """Let it end once every channel has."""
        with self._lock:
            self._leaving = True
        self.poke()

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; says whether it has come."""
        if self.alive:
            self._thread.join(timeout_s)
        return not self.alive

    def close(self) -> None:
        """Let go of its descriptors."""
        self._poller.close()
        with self._lock:
            os.close(self._wake)
            self._wake = -1

    def watch(self, node: NodeState) -> None:
        """Read a node's channel from now on."""
        assert node.handle is not None
        self._poller.watch(node.handle.channel.fileno(), node)
        self.poke()

    def unwatch(self, fd: int) -> None:
        """Read this channel no more."""
        self._poller.unwatch(fd)

    def want_write(self, fd: int, wanted: bool) -> None:
        """Say when this channel takes more, or no longer."""
        self._poller.want_write(fd, wanted)

    def poke(self) -> None:
        """Have it look at what is due now."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def after(self, delay_s: float, action: Callable[[], None]) -> Timer:
        """Run an action later."""
        with self._lock:
            timer, soonest = self._timers.add(delay_s, action)
        if soonest and not self.is_current:
            self.poke()
        return timer

    def take_back(self, timer: Timer) -> None:
        """It is not to be run. The lock is held."""
        self._timers.take_back(timer)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._listener.failed(error)
            raise

    def _serve(self) -> None:
        while True:
            if self._listener.is_full():
                self._run_timers()
                continue
            with self._lock:
                next_s = self._timers.next_s()
            for node, readable, writable in self._poller.wait(next_s):
                if node is None:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                    continue
                if writable:
                    self._listener.writable(node)
                if readable:
                    self._read_node(node)
            self._run_timers()
            with self._lock:
                if self._leaving and len(self._poller) == 1:
                    return

    def _read_node(self, node: NodeState) -> None:
        assert node.handle is not None
        reason = "its agent ended"
        try:
            data, fds = receive(node.handle.channel)
            received = node.parser.feed(data, fds) if data else []
        except BlockingIOError:
            return
        except (OSError, WireError) as error:
            data, received, reason = b"", [], f"its channel broke: {error}"
        if not data:
            self._listener.lost(node, reason)
            return
        with self._lock:
            self._listener.take(node, received)

    def _run_timers(self) -> None:
        while True:
            with self._lock:  # taken anew for each, so that callers get their turn
                action = self._timers.due()
                if action is None:
                    return
                action()
