"""How a folder travels: a copy to a node of this machine, or a tar to a host, of what is not there yet.

What an earlier transfer brought and the source no longer has is deleted; what a job wrote stays (``receive``).
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from atoll.core.errors import ConfigError
from atoll.tasks.sync.receive import BUFFER_BYTES, END, LISTING, Entry, Receiver, below, manifest, unwritable
from atoll.tasks.sync.select import Survey, printable, survey, unreadable

Progress = Callable[[int, int], None]  # bytes done, bytes in all
_PIECE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Mirrored:
    """What a mirror did: what it copied and deleted, and lines for the user."""

    num_files: int
    num_bytes: int
    num_deleted: int
    notes: tuple[str, ...]


def changed(source: Survey, there: Mapping[str, Entry]) -> list[Entry]:
    """The files of ``source`` that have to be sent to where ``there`` (a ``receive.manifest``) lies."""
    return [entry for entry in source.entries if entry.kind == "file" and there.get(entry.path) != entry]


def mirror(source: Path | Survey, dest: Path, progress: Progress | None = None) -> Mirrored:
    """Make ``dest`` on this machine what travels of ``source``, copying only what differs in size, time or mode.

    What an earlier mirror brought and the source no longer has is deleted; what a job wrote stays.

    Args:
        source: a folder or a single file, or what ``survey`` saw there.
        progress: called with the bytes copied so far and those to copy.

    Raises:
        ConfigError: a file cannot be read, or something that a job wrote is in the way.
        ProvisionError: ``dest`` cannot be written, e.g. because the disk is full.
    """
    seen = source if isinstance(source, Survey) else survey(source)
    todo = changed(seen, manifest(dest))
    count = _Count(sum(entry.size for entry in todo), progress)
    try:
        with Receiver(dest, {entry.path: entry for entry in seen.entries}) as receiver:
            for entry in todo:
                with _Opened(seen.root, entry, count) as opened:
                    if opened.file is not None:
                        with receiver.file(entry) as file:
                            opened.copy_to(file)
            receiver.put_links_and_folders()
    except OSError as error:
        raise unwritable(dest, error) from None
    return Mirrored(count.num_files, count.num_bytes, receiver.num_deleted, (*seen.notes, *count.notes))


def write_tar(source: Survey, send: Iterable[Entry], stream: IO[bytes], progress: Progress | None = None) -> Mirrored:
    """Write a tar with the files ``send`` of ``source``, for ``receive.apply`` on the other side.

    Raises:
        ConfigError: a file cannot be read.
        OSError: ``stream`` cannot be written.
    """
    todo = list(send)
    count = _Count(sum(entry.size for entry in todo), progress)
    with tarfile.open(fileobj=stream, mode="w|", bufsize=BUFFER_BYTES, format=tarfile.PAX_FORMAT) as tar:
        tar.copybufsize = BUFFER_BYTES  # type: ignore[attr-defined]  # typeshed lacks it; 16 KiB is its default
        _add(tar, LISTING, json.dumps(source.entries).encode())
        for entry in todo:
            with _Opened(source.root, entry, count) as opened:
                if opened.file is not None:
                    member = tarfile.TarInfo(entry.path)
                    member.size = opened.size
                    tar.addfile(member, opened)
        _add(tar, END, b"")
    return Mirrored(count.num_files, count.num_bytes, 0, (*source.notes, *count.notes))


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


class _Count:
    """What was copied so far, and what there is to tell."""

    def __init__(self, num_bytes_in_all: int, progress: Progress | None) -> None:
        self.num_files = 0
        self.num_bytes = 0
        self.notes: list[str] = []
        self._in_all = num_bytes_in_all
        self._progress = progress

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self._progress is not None:
            self._progress(self.num_bytes, self._in_all)


class _Opened:
    """A file of the source while it is copied: as long as it was when it was opened, whatever happens to it."""

    def __init__(self, root: Path, entry: Entry, count: _Count) -> None:
        self.file: IO[bytes] | None = None
        self.size = 0
        self._at = below(root, entry.path)
        self._entry = entry
        self._count = count
        self._left = 0

    def __enter__(self) -> _Opened:
        try:
            # Without following: a link that has taken the file's place would bring what was never listed.
            descriptor = os.open(self._at, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except PermissionError:
            raise unreadable(self._at) from None
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise ConfigError(f"{printable(self._at)} cannot be read: {error.strerror}") from None
            return self._gone()
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            return self._gone()
        self.file = os.fdopen(descriptor, "rb", buffering=0)
        self.size = self._left = found.st_size
        return self

    def _gone(self) -> _Opened:
        self._count.notes.append(f"not copied, it went away meanwhile: {printable(self._entry.path)}")
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is None:
            return
        with self.file:
            now = os.fstat(self.file.fileno())
            if (now.st_size, now.st_mtime_ns) != (self._entry.size, self._entry.mtime_ns):
                self._count.notes.append(f"changed while it was copied: {printable(self._entry.path)}")
        self._count.num_files += 1

    def read(self, size: int = -1) -> bytes:
        """For a tar, whose header has told the size: what a file that shrank lacks is zeros."""
        assert self.file is not None
        size = min(size, self._left) if size >= 0 else self._left
        piece = self.file.read(size)
        self._left -= size
        self._count.add(size)
        return piece.ljust(size, b"\0")

    def copy_to(self, file: IO[bytes]) -> None:
        """Copy inside the kernel, without the bytes coming here; holes stay holes."""
        assert self.file is not None
        here, there = self.file.fileno(), file.fileno()
        copy: Callable[[int, int, int], int] = os.copy_file_range
        done = 0
        while done < self.size:
            start, end = _next_data(here, done, self.size)
            if start > done:
                self._count.add(start - done)
                os.ftruncate(there, start)
                done = os.lseek(there, start, os.SEEK_SET)
                continue
            try:
                num_bytes = copy(here, there, min(_PIECE_BYTES, end - done))
            except OSError as error:
                if copy is not os.copy_file_range or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                    raise
                copy = _send_file  # two file systems that cannot do it, or one that never can
                continue
            if num_bytes == 0:
                break  # it shrank
            done += num_bytes
            self._count.add(num_bytes)


def _next_data(fd: int, at: int, size: int) -> tuple[int, int]:
    """Where the bytes from ``at`` on begin that are no hole, and where they end; the file stands at their beginning."""
    try:
        start = os.lseek(fd, at, os.SEEK_DATA)
        end = os.lseek(fd, start, os.SEEK_HOLE)
    except OSError as error:
        if error.errno == errno.ENXIO:  # nothing but a hole is left
            start = end = max(at, min(size, os.fstat(fd).st_size))
        else:  # a file system that knows of none
            start, end = at, size
    os.lseek(fd, start, os.SEEK_SET)
    return min(start, size), min(end, size)


def _send_file(here: int, there: int, num_bytes: int) -> int:
    return os.sendfile(there, here, None, num_bytes)
