"""Files that a node sees at paths where the machine has something else, or nothing. For a mount namespace of one's own.

Nothing is made on the machine for it: a folder that lacks a name is covered by one of the node's that has it, and in
which what the folder holds is seen again. What a job writes into the cover itself stays there, for the node's next job.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import urllib.parse

_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC = 1, 32, 4096, 16384
_KEPT_FLAGS = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC  # a user may not take them off; mount() has the same numbers
_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


class Overmounts:
    """Makes the mounts, and knows them.

    Args:
        scratch: a path that may be made for a moment.
        kept: a folder of the node's, for what covers hold.
    """

    def __init__(self, scratch: str, kept: str) -> None:
        self._scratch = scratch
        self._kept = kept
        self._covers: set[str] = set()
        self._over: set[str] = set()  # what is seen in a cover or beside it, and is none
        self._made: list[str] = []

    def __len__(self) -> int:
        return len(self._made)

    def bind(self, source: str, target: str, *, writable: bool = True) -> None:
        """See ``source`` at ``target``, which exists and is of its kind.

        Raises:
            OSError: the kernel refuses.
        """
        _mount(source, target, None, _MS_BIND | _MS_REC)
        self._made.append(target)
        if not writable:
            flags = os.statvfs(target).f_flag & _KEPT_FLAGS
            _mount(None, target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | flags)

    def bind_fd(self, fd: int, target: str, *, writable: bool) -> None:
        """See what is open at ``target``, which is made where it is missing.

        Raises:
            OSError: the kernel refuses.
        """
        if not os.path.lexists(target):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            _make_like(os.fstat(fd).st_mode, target)
        self.bind(f"/proc/self/fd/{fd}", target, writable=writable)

    def undo(self, keep: int = 0) -> None:
        """Take all but the first so many off again."""
        while len(self._made) > keep:
            _libc.umount2(os.fsencode(self._made.pop()), _MNT_DETACH)

    def show(self, source: str, target: str) -> None:
        """See ``source`` at ``target``, whether that exists or not.

        Raises:
            OSError: the kernel refuses, or a file and a folder meet.
        """
        target = os.path.realpath(target)
        if not os.path.lexists(target):
            above = os.path.dirname(target)
            while not os.path.lexists(above):
                above = os.path.dirname(above)
            if above != "/tmp" and not self._is_covered(above):
                self._cover(above)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            _make_like(os.stat(source).st_mode, target)
        self.bind(source, target)
        self._over.add(target)

    def _is_covered(self, folder: str) -> bool:
        """Does a folder lie in a cover itself, and not in what is seen through it?"""
        around = [each for each in self._covers | self._over if f"{folder}/".startswith(f"{each.rstrip('/')}/")]
        return max(around, key=len, default=None) in self._covers

    def _cover(self, folder: str) -> None:
        own = os.path.join(self._kept, urllib.parse.quote(folder, safe=""))
        os.makedirs(own, exist_ok=True)
        os.chmod(own, stat.S_IMODE(os.stat(folder).st_mode))
        with contextlib.ExitStack() as opened:
            held = {}
            kept = os.open(own, os.O_PATH | os.O_CLOEXEC)  # the way to it may be covered soon
            opened.callback(os.close, kept)
            for name in os.listdir(folder):
                with contextlib.suppress(FileNotFoundError):  # it went away just now
                    held[name] = os.open(os.path.join(folder, name), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
                    opened.callback(os.close, held[name])
            cover = folder
            if folder == "/":
                cover = self._scratch
                os.mkdir(cover)
            _mount(f"/proc/self/fd/{kept}", cover, None, _MS_BIND)
            for name, fd in held.items():
                _repeat(fd, os.path.join(cover, name))
                self._over.add(os.path.join(folder, name))
        if folder == "/":
            _become_root(cover)
            _libc.umount2(os.fsencode(cover), _MNT_DETACH)  # it is seen in itself
            os.rmdir(cover)
        else:
            self._made.append(folder)
        self._covers.add(folder)


def _repeat(fd: int, path: str) -> None:
    """Have what is open seen at ``path`` too."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISLNK(mode):
        if not os.path.lexists(path):  # an earlier job's agent may have made it
            os.symlink(os.readlink("", dir_fd=fd), path)
        return
    _make_like(mode, path)
    _mount(f"/proc/self/fd/{fd}", path, None, _MS_BIND | _MS_REC)


def _make_like(mode: int, path: str) -> None:
    """Make what something can be mounted on, unless an earlier job's agent has."""
    if stat.S_ISDIR(mode):
        os.makedirs(path, exist_ok=True)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_CLOEXEC, 0o600))


def _become_root(folder: str) -> None:
    os.chdir(folder)
    if _libc.pivot_root(b".", b".") != 0:  # the old root lies on the new one then
        raise _error("/")
    _libc.umount2(b".", _MNT_DETACH)
    os.chdir("/")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    if _libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]) != 0:
        raise _error(target)


def _error(target: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), target)
