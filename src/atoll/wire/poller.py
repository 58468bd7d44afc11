"""Waiting for descriptors. As ``selectors``, without what that does around each wait: this is on every call's path."""

from __future__ import annotations

import contextlib
import select
from typing import Generic, TypeVar

T = TypeVar("T")
READ = 1
WRITE = 4
LONGEST_S = 1e6  # what the system call takes


class Poller(Generic[T]):
    """Descriptors and what each stands for.

    Attributes:
        poll: as ``select.epoll``'s, for a loop that spares ``wait``.
        watched: by descriptor, what it stands for.
    """

    def __init__(self) -> None:
        self._poll = select.epoll()
        self.poll = self._poll.poll
        self.watched: dict[int, T] = {}
        self._writing: set[int] = set()

    def __len__(self) -> int:
        return len(self.watched)

    def watch(self, fd: int, what: T) -> None:
        """Report when the descriptor can be read, or has ended."""
        self._poll.register(fd, READ)
        self.watched[fd] = what

    def unwatch(self, fd: int) -> None:
        """Forget it; does nothing where it is not watched."""
        if self.watched.pop(fd, None) is not None:
            self._writing.discard(fd)
            with contextlib.suppress(OSError):  # one that was closed is forgotten already
                self._poll.unregister(fd)

    def want_write(self, fd: int, wanted: bool) -> None:
        """Report also when it can be written, or no longer."""
        if wanted != (fd in self._writing) and fd in self.watched:
            self._poll.modify(fd, READ | WRITE if wanted else READ)
            if wanted:
                self._writing.add(fd)
            else:
                self._writing.discard(fd)

    def wait(self, timeout_s: float | None) -> list[tuple[T, bool, bool]]:
        """What is ready, and whether to read and to write; waits for ever with None."""
        ready = self._poll.poll(None if timeout_s is None else min(timeout_s, LONGEST_S))
        return [
            (self.watched[fd], bool(events & ~WRITE), bool(events & WRITE))
            for fd, events in ready
            if fd in self.watched
        ]

    def close(self) -> None:
        """Forget everything."""
        self.watched.clear()
        self._poll.close()
