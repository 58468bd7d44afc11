"""Ports of jobs: those that scripts fix, with a lock file for each so that two jobs on one network take turns.

Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from atoll.core.errors import ConfigError

# Not where the kernel takes ports for outgoing connections from.
_FIRST_PORT, _LAST_PORT = 20_000, 32_000


class PortLocks:
    """The ports that one job holds.

    Args:
        folders: where the lock files of its networks lie.
        holder: who others hear has them.
    """

    def __init__(self, folders: Iterable[Path], holder: str) -> None:
        self._folders = sorted(set(folders))  # in one order, so that no two jobs each hold what the other waits for
        self._holder = holder
        self._held: list[int] = []

    def lock(self, ports: Sequence[int]) -> str | None:
        """Take all of them, or none: then says who holds the first that is not free.

        Raises:
            ConfigError: a lock file can't be opened or locked.
        """
        for folder, port in itertools.product(self._folders, ports):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                fd = os.open(folder / f"{port}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                self._held.append(fd)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 4096, 0).decode(errors="replace") or "another job"
                os.close(self._held.pop())
                self.free()
                return f"port {port}, held by {holder}"
            except OSError as error:
                self.free()
                raise ConfigError(
                    f"the lock of port {port} can't be taken: {error}. Move {folder.parent} away while no job "
                    f"runs that fixes a port, and start the job again"
                ) from error
        self._write(self._holder.encode())
        return None

    def free(self) -> None:
        """Give all of them up. The files stay: removing one that another job waits for would let two in."""
        self._write(b"")
        while self._held:
            os.close(self._held.pop())

    def _write(self, holder: bytes) -> None:
        for fd in self._held:
            with contextlib.suppress(OSError):  # on a full disk others are told less
                os.ftruncate(fd, 0)
                os.pwrite(fd, holder, 0)


def free_port(addr: str) -> int:
    """A port that nobody listens on at an address of this machine; any port where the address is another one's."""
    for _ in range(100):
        port = random.randint(_FIRST_PORT, _LAST_PORT)
        with socket.socket() as probe:
            try:
                probe.bind((addr, port))
            except OSError:  # taken, or the address is another machine's
                continue
            return port
    return random.randint(_FIRST_PORT, _LAST_PORT)
