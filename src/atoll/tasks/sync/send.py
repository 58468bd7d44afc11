"""How a folder is sent: file by file to a ``Receiver`` on this machine, or in a tar to one on a host.

Only what differs in size, time or mode is sent. What an earlier transfer brought and the source no longer has is
deleted there; what a job wrote stays (``receive``).
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from atoll.core.errors import ConfigError
from atoll.tasks.sync.receive import BUFFER_BYTES, END, Entry, Readable, Receiver, below, unwritable
from atoll.tasks.sync.select import Selection, printable, select, unreadable

Progress = Callable[[int, int], object]  # bytes done, bytes in all


def mirror(source: Path | Selection, dest: Path, progress: Progress | None = None) -> list[str]:
    """Make ``dest`` on this machine what is selected of ``source``; a line for each file that went away meanwhile.

    Args:
        source: a folder or a single file, or what ``select`` found there.
        progress: called with the bytes copied so far and those to copy.

    Raises:
        ConfigError: a file cannot be read, or something that a job wrote is in the way.
        ProvisionError: ``dest`` cannot be written, e.g. because the disk is full.
    """
    selection = source if isinstance(source, Selection) else select(source)
    try:
        with Receiver(dest, {entry.path: entry for entry in selection.entries}) as receiver:
            return _send_files(selection, receiver.wanted(), receiver.put, progress)
    except OSError as error:
        raise unwritable(dest, error) from None


def send(
    selection: Selection, stream: IO[bytes], wanted: Callable[[], list[str]], progress: Progress | None = None
) -> list[str]:
    """Write to a ``receive.receive`` at the other end of ``stream``; a line for each file that went away meanwhile.

    Args:
        wanted: waits for its answer: which files it lacks.

    Raises:
        ConfigError: a file cannot be read.
        OSError: ``stream`` cannot be written.
    """
    stream.write(json.dumps(selection.entries).encode() + b"\n")
    stream.flush()
    lacking = set(wanted())
    todo = [entry for entry in selection.entries if entry.path in lacking]
    with tarfile.open(fileobj=stream, mode="w|", bufsize=BUFFER_BYTES, format=tarfile.PAX_FORMAT) as tar:
        tar.copybufsize = BUFFER_BYTES  # type: ignore[attr-defined]  # typeshed lacks it; 16 KiB is its default

        def put(entry: Entry, content: Readable) -> None:
            member = tarfile.TarInfo(entry.path)
            member.size = entry.size
            tar.addfile(member, content)

        notes = _send_files(selection, todo, put, progress)
        put(Entry(END, "file"), io.BytesIO())
    return notes


class _Content:
    """The bytes of a file of the source, as many as it had when it was opened."""

    def __init__(self, path: str, file: IO[bytes], num_bytes: int, count: Callable[[int], None]) -> None:
        self._path, self._file, self._left, self._count = path, file, num_bytes, count

    def read(self, size: int = BUFFER_BYTES, /) -> bytes:
        piece = self._file.read(min(size, self._left))
        if not piece and self._left:
            raise ConfigError(f"{printable(self._path)} shrank while it was copied: run the command again")
        self._left -= len(piece)
        self._count(len(piece))
        return piece


def _send_files(
    source: Selection, todo: list[Entry], put: Callable[[Entry, Readable], None], progress: Progress | None
) -> list[str]:
    notes, done, in_all = list[str](), 0, sum(entry.size for entry in todo)

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, in_all)

    for entry in todo:
        path = below(source.root, entry.path)
        file = _open(path)
        if file is None:
            notes.append(f"not copied, it was removed in the meantime: {printable(entry.path)}")
            continue
        with file:
            num_bytes = os.fstat(file.fileno()).st_size
            put(entry._replace(size=num_bytes), _Content(path, file, num_bytes, count))
    return notes


def _open(path: str) -> IO[bytes] | None:
    """A file of the source; None where it is gone, or something else has taken its place."""
    try:
        # Without following: a link that has taken the file's place would bring what was never listed.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError:
        raise unreadable(path) from None
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise ConfigError(f"{printable(path)} cannot be read: {error.strerror}") from None
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return os.fdopen(descriptor, "rb", buffering=0)
