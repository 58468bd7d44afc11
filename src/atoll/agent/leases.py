"""GPUs of this machine that are in use: whoever uses one holds a lock on a file named after it. Standard library only.

The kernel frees the lock with its owner, however that dies. The files stay: they are the same for all users.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable, Sequence

# Containers that share the host's IPC share it; nothing there is removed for its age, as in /tmp.
FOLDER = "/dev/shm/atoll-gpus"
_MOST_BYTES = 300  # of what a holder says of itself: anybody may write these files


class Leases:
    """The GPUs that this process leases."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}

    @property
    def gpus(self) -> list[str]:
        """UUIDs of those it has."""
        return list(self._held)

    def lease(self, gpus: Sequence[str], count: int, holder: str) -> dict[str, str]:
        """Leases the first ``count`` of these GPUs that are free, or none.

        Args:
            gpus: UUIDs, the preferred ones first.
            count: how many.
            holder: what others are told of who has them.

        Returns:
            where too few are free, the holders of the others by UUID.

        Raises:
            OSError: the files can't be opened.
        """
        self.release()
        taken: dict[str, str] = {}
        for gpu in gpus:
            if len(self._held) == count:
                break
            fd = _open(gpu)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                taken[gpu] = _holder(fd)
                os.close(fd)
                continue
            self._held[gpu] = fd
        if len(self._held) < count:
            self.release()
            return taken
        for fd in self._held.values():
            os.ftruncate(fd, 0)
            os.pwrite(fd, holder.encode()[:_MOST_BYTES], 0)
        return {}

    def release(self) -> None:
        """Gives all of them back."""
        while self._held:
            os.close(self._held.popitem()[1])


def holders(gpus: Iterable[str]) -> dict[str, str]:
    """Who holds which of these GPUs, by UUID; those that are free are left out."""
    found = {}
    for gpu in gpus:
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(_path(gpu), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found[gpu] = _holder(fd)
            finally:
                os.close(fd)
    return found


def _path(gpu: str) -> str:
    return os.path.join(FOLDER, re.sub(r"[^\w.-]", "_", gpu))


def _open(gpu: str) -> int:
    """The file of a GPU, which any user can lock. O_CREAT on another user's file may be refused in such a folder."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(FOLDER)
        os.chmod(FOLDER, 0o1777)
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        with contextlib.suppress(FileNotFoundError):
            return os.open(_path(gpu), flags)
        with contextlib.suppress(FileExistsError):
            fd = os.open(_path(gpu), flags | os.O_CREAT | os.O_EXCL)
            os.fchmod(fd, 0o666)
            return fd


def _holder(fd: int) -> str:
    said = os.pread(fd, _MOST_BYTES, 0).decode(errors="replace")
    return "".join(each for each in said if each.isprintable()) or "a process that is just starting"
