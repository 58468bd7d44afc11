"""Numbered records on a byte stream that may break: what carries frames and memory files between two hosts.

A record is a header, then its body::

    kind u8 | keeps u8 | num_files u16 | mark u32 | number u64 | body_bytes u64 | body

Frames, files (contents of a memory file) and the end are numbered and kept until the other side has passed them on;
a new link continues behind the last one that arrived whole. The files before a FRAMES record go beside it, and where it
``keeps`` them beside the next one too, so that a file which many ranks of a node get travels once. Standard library
only: it runs on hosts without Atoll's packages.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from atoll.wire import frames
from atoll.wire.frames import RawFrame, WireError, close_all

VERSION: Final = 2
MAGIC: Final = b"\0atoll link\0"
_HEADER: Final = struct.Struct("<BBHIQQ")
_MARK: Final = 0x4B4E4C41
HELLO, REFUSED, PING, FRAMES, FILE, END = range(1, 7)

_MAX_FRAMES_BYTES: Final = 1 << 29
_MAX_GREETING_BYTES: Final = 1 << 16
_CHUNK_BYTES: Final = 1 << 16  # a larger buffer would be mapped and unmapped by the allocator at every read
_TURN_BYTES: Final = 4 << 20  # written in one turn, so that a fast reader does not keep us from everything else
_BATCH: Final = 64  # records in one write
_WINDOW_BYTES: Final = 16 << 20
_WINDOW_FILES: Final = 256  # each holds a descriptor here and one on the other side


@dataclass(frozen=True, slots=True)
class _Record:
    number: int
    head: bytes
    data: bytes = b""
    fd: int = -1  # of a file, whose ``file_bytes`` follow the head
    file_bytes: int = 0


class Arrived(NamedTuple):
    """A record as received: PING with the number that the other side has passed on, FRAMES, or END with its reason."""

    kind: int
    number: int
    data: bytes
    fds: tuple[int, ...] = ()


def _header(kind: int, number: int, body_bytes: int, num_files: int = 0, *, keeps: bool = False) -> bytes:
    return _HEADER.pack(kind, keeps, num_files, _MARK, number, body_bytes)


# ---------------------------------------------------------------------------------------------------- greeting
def greeting(kind: int, meta: dict[str, Any]) -> bytes:
    """The first thing either side says on a link: HELLO, or REFUSED with a ``reason``."""
    body = json.dumps(meta).encode()
    return MAGIC + _header(kind, 0, len(body)) + body


class Greeter:
    """Waits for the other side's greeting. ``rest`` is what came behind it."""

    def __init__(self, *, skip_noise: bool) -> None:
        self._skip_noise = skip_noise  # a login shell's start files may print something first
        self._data = b""
        self.rest = b""

    def feed(self, data: bytes) -> tuple[int, dict[str, Any]] | None:
        """Add what was received; returns kind and meta once they are whole.

        Raises:
            WireError: this is no greeting.
        """
        self._data += data
        at = self._data.find(MAGIC)
        if not self._skip_noise and not self._data.startswith(MAGIC[: len(self._data)]):
            raise WireError("the other side did not greet")
        if at < 0:
            self._data = self._data[1 - len(MAGIC) :]  # of noise, however much, only what may begin the greeting
            return None
        start = at + len(MAGIC)
        if len(self._data) < start + _HEADER.size:
            return None
        kind, _, _, mark, _, length = _HEADER.unpack_from(self._data, start)
        if mark != _MARK or kind not in (HELLO, REFUSED) or length > _MAX_GREETING_BYTES:
            raise WireError("the other side did not greet")
        start += _HEADER.size
        if len(self._data) < start + length:
            return None
        try:
            meta = json.loads(self._data[start : start + length])
        except (ValueError, RecursionError) as error:
            raise WireError(f"the greeting is not JSON: {error}") from error
        if not isinstance(meta, dict):
            raise WireError("the greeting is not an object")
        self.rest = self._data[start + length :]
        return kind, meta


# ----------------------------------------------------------------------------------------------------- sending
class RecordSender:
    """What has to reach the other side. ``passed_on`` is what we tell it about its own records."""

    def __init__(self) -> None:
        self.passed_on = 0
        self.ping_due = False
        self.greeting = b""
        self._numbers = 0
        self._acknowledged = 0
        self._unsent: deque[_Record] = deque()
        self._sent: deque[_Record] = deque()  # whole or in part, not known to be passed on
        self._parts: deque[memoryview] = deque()
        self._file: _Record | None = None  # being written, behind ``_parts``
        self._file_at = 0
        self._waiting_bytes = 0
        self._waiting_files = 0
        # The call and files of the last frame, if the other side keeps those, and descriptors that hold their inodes.
        self._kept: tuple[int, list[tuple[int, int]]] | None = None
        self._kept_fds: list[int] = []

    @property
    def full(self) -> bool:
        """Is so much on its way that no more should be taken in?"""
        return self._waiting_bytes > _WINDOW_BYTES or self._waiting_files > _WINDOW_FILES

    @property
    def empty(self) -> bool:
        """Did the other side pass everything on?"""
        return not self._unsent and not self._sent

    def add(self, received: Sequence[RawFrame]) -> None:
        """Take frames, and their descriptors."""
        plain: list[bytes] = []
        for frame in received:
            if not frame.fds:
                plain.append(frame.data)
                continue
            self._add_plain(plain)
            plain = []
            self._add_with_files(frame)
        self._add_plain(plain)

    def end(self, reason: str) -> None:
        """Nothing comes after this."""
        self._append(END, reason.encode(errors="replace"))

    def acknowledge(self, number: int) -> None:
        """The other side passed on everything up to this record."""
        self._acknowledged = max(self._acknowledged, number)
        while self._sent and self._sent[0].number <= number and self._sent[0] is not self._file:
            record = self._sent.popleft()
            self._waiting_bytes -= len(record.data)
            if record.fd >= 0:
                self._waiting_files -= 1
                os.close(record.fd)

    def rewind(self, received: int) -> None:
        """A new link: go on behind the last record that arrived whole.

        Raises:
            WireError: that is none of ours, or one that is gone.
        """
        if not self._acknowledged <= received <= self._numbers:
            raise WireError(f"the other side has record {received}, of {self._acknowledged} to {self._numbers}")
        self._parts.clear()
        self._file = None
        while self._sent and self._sent[-1].number > received:
            self._unsent.appendleft(self._sent.pop())

    def write(self, fd: int) -> bool:
        """Write what the descriptor takes; returns whether nothing is left. Raises ``OSError`` where it is broken."""
        left = _TURN_BYTES
        with contextlib.suppress(BlockingIOError):
            while left > 0:
                if self._parts:
                    left -= self._write_parts(fd)
                elif self._file is not None:
                    left -= self._write_file(fd, self._file)
                elif self._unsent or self.greeting or self.ping_due:
                    self._fill()
                else:
                    return True
        return False

    def close(self) -> None:
        """Let go of everything."""
        close_all(record.fd for record in (*self._sent, *self._unsent) if record.fd >= 0)
        self._sent.clear()
        self._unsent.clear()
        self._forget_kept()

    def _add_plain(self, plain: list[bytes]) -> None:
        if plain:
            self._forget_kept()
            self._append(FRAMES, plain[0] if len(plain) == 1 else b"".join(plain))

    def _add_with_files(self, frame: RawFrame) -> None:
        # A CALL may go to more ranks; other files are for one frame, and may change.
        keeps = frame.kind == frames.CALL
        files = [(status.st_dev, status.st_ino) for status in map(os.fstat, frame.fds)]
        if keeps and self._kept == (frame.call, files):
            close_all(frame.fds)
        else:
            self._forget_kept()
            if keeps:
                self._kept, self._kept_fds = (frame.call, files), [os.dup(fd) for fd in frame.fds]
            for fd in frame.fds:
                self._append(FILE, fd=fd)
        self._append(FRAMES, frame.data, num_files=len(files), keeps=keeps)

    def _forget_kept(self) -> None:
        close_all(self._kept_fds)
        self._kept, self._kept_fds = None, []

    def _append(self, kind: int, data: bytes = b"", *, fd: int = -1, num_files: int = 0, keeps: bool = False) -> None:
        self._numbers += 1
        file_bytes = os.fstat(fd).st_size if fd >= 0 else 0
        head = _header(kind, self._numbers, len(data) + file_bytes, num_files, keeps=keeps)
        self._unsent.append(_Record(self._numbers, head, data, fd, file_bytes))
        self._waiting_bytes += len(data)
        self._waiting_files += fd >= 0

    def _fill(self) -> None:
        """The next things to write: up to the next file."""
        if self.greeting:
            self._parts.append(memoryview(self.greeting))
            self.greeting = b""
        if self.ping_due:
            self._parts.append(memoryview(_header(PING, self.passed_on, 0)))
            self.ping_due = False
        while self._unsent and len(self._parts) < _BATCH and self._file is None:
            record = self._unsent.popleft()
            self._sent.append(record)
            self._parts.append(memoryview(record.head))
            if record.data:
                self._parts.append(memoryview(record.data))
            if record.fd >= 0:
                self._file, self._file_at = record, 0

    def _write_parts(self, fd: int) -> int:
        written = left = os.writev(fd, list(self._parts)[: 2 * _BATCH])
        while left:
            part = self._parts.popleft()
            if left < len(part):
                self._parts.appendleft(part[left:])
                break
            left -= len(part)
        return written

    def _write_file(self, fd: int, record: _Record) -> int:
        chunk = os.pread(record.fd, min(record.file_bytes - self._file_at, _CHUNK_BYTES), self._file_at)
        if not chunk and self._file_at < record.file_bytes:
            raise OSError(f"a memory file ended {record.file_bytes - self._file_at} bytes early")
        written = os.write(fd, chunk) if chunk else 0
        self._file_at += written
        if self._file_at == record.file_bytes:
            self._file = None
        return written


# --------------------------------------------------------------------------------------------------- receiving
class RecordReceiver:
    """Cuts what a link delivers into records. ``received`` is the number of the last whole one."""

    def __init__(self) -> None:
        self.received = 0
        self._data = bytearray()
        self._files: list[int] = []  # for the next frame, or kept from the last one
        self._kept = False
        self._fd = -1  # of a file of which part has arrived
        self._left = 0  # of its bytes

    def rewind(self, rest: bytes) -> None:
        """A new link: half a record is void, the other side sends it again."""
        self._data = bytearray(rest)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, fd: int) -> bool:
        """One read; whether there was anything, or the stream is at its end. ``cut`` has what came of it.

        Raises:
            OSError: the link broke, or ``BlockingIOError``.
        """
        data = os.read(fd, _CHUNK_BYTES)
        self._data += data
        return bool(data)

    def cut(self) -> Iterator[Arrived]:
        """Every record that is now whole.

        Raises:
            WireError: behind those, this is no stream of records.
        """
        at = 0
        try:
            while True:
                if self._fd >= 0:
                    at += self._fill_file(at)
                    if self._fd >= 0:
                        return
                if len(self._data) - at < _HEADER.size:
                    return
                kind, keeps, num_files, number, length = self._header(at)
                start = at + _HEADER.size
                if kind == FILE:
                    if self._kept:
                        self._drop_files()
                    self._fd, self._left, at = os.memfd_create("atoll", os.MFD_CLOEXEC), length, start
                    continue
                if len(self._data) < start + length:
                    return
                with memoryview(self._data) as data, data[start : start + length] as part:
                    body = bytes(part)
                at = start + length
                fds: tuple[int, ...] = ()
                if kind != PING:
                    self.received = number
                    fds = self._files_of(num_files, keeps)
                yield Arrived(kind, number, body, fds)
        finally:
            del self._data[:at]

    def close(self) -> None:
        """Let go of everything."""
        self.rewind(b"")
        self._drop_files()

    def _header(self, at: int) -> tuple[int, bool, int, int, int]:
        kind, keeps, num_files, mark, number, length = _HEADER.unpack_from(self._data, at)
        if mark != _MARK or keeps > 1 or not PING <= kind <= END:
            raise WireError("bytes that are not a record came over the link")
        if kind != PING and number != self.received + 1:
            raise WireError(f"record {number} came over the link where {self.received + 1} was expected")
        if kind != FILE and length > _MAX_FRAMES_BYTES:
            raise WireError(f"a record of {length} bytes came over the link")
        if num_files not in (0, len(self._files)):
            raise WireError(f"record {number} names {num_files} files, and {len(self._files)} came")
        return kind, bool(keeps), num_files, number, length

    def _files_of(self, num_files: int, keeps: bool) -> tuple[int, ...]:
        """The descriptors that go beside a frame; they are the caller's."""
        if not num_files:
            self._drop_files()
        self._kept = keeps
        if keeps:
            return tuple(map(os.dup, self._files))
        files, self._files = self._files, []
        return tuple(files)

    def _fill_file(self, at: int) -> int:
        """Put what was read into the file; returns how much."""
        num = min(self._left, len(self._data) - at)
        if num:
            with memoryview(self._data) as data, data[at : at + num] as part:
                self._left -= os.write(self._fd, part)
        if not self._left:
            self._files.append(self._fd)
            self._fd = -1
            self.received += 1
        return num

    def _drop_files(self) -> None:
        close_all(self._files)
        self._files, self._kept = [], False
