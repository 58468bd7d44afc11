"""Numbered records on a byte stream that may break: what carries frames and memory files between two hosts.

A record is a header, then its body::

    kind u8 | 0 | num_refs u16 | mark u32 | number u64 | body_bytes u64 | body

Frames, blobs (contents of a memory file) and the end are numbered and kept until the other side has passed them on;
a new link continues behind the last one that arrived whole. Frames name the blobs that go beside them by number, so
a file that many ranks of a node get travels once. Standard library only: it runs on hosts without Atoll's packages.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from atoll.wire import frames
from atoll.wire.frames import RawFrame, WireError

VERSION: Final = 1
MAGIC: Final = b"\0atoll link\0"
_HEADER: Final = struct.Struct("<BBHIQQ")
_MARK: Final = 0x4B4E4C41
_REF: Final = struct.Struct("<Q")
HELLO, REFUSED, PING, FRAMES, BLOB, FORGET, END = range(1, 8)

_MAX_FRAMES_BYTES: Final = 1 << 29
_MAX_GREETING_BYTES: Final = 1 << 16
_READ_BYTES: Final = 1 << 16  # a larger buffer would be mapped and unmapped by the allocator at every read
_TURN_BYTES: Final = 4 << 20  # written in one turn, so that a fast reader does not keep us from everything else
_BATCH: Final = 64  # buffers in one write
_WINDOW_BYTES: Final = 16 << 20
_WINDOW_BLOBS: Final = 256  # each holds a descriptor here and one on the other side


class Blob:
    """A memory file and how many still need it."""

    __slots__ = ("_holders", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._holders = 1

    def hold(self) -> Blob:
        """One more needs it."""
        self._holders += 1
        return self

    def drop(self) -> None:
        """One needs it no longer."""
        self._holders -= 1
        if not self._holders:
            os.close(self.fd)


@dataclass(frozen=True, slots=True)
class _Record:
    number: int
    head: bytes
    data: bytes = b""
    blob: Blob | None = None
    blob_bytes: int = 0


class Arrived(NamedTuple):
    """A record as received: PING with the number that the other side has passed on, FRAMES, or END with its reason."""

    kind: int
    number: int
    data: bytes
    blobs: tuple[Blob, ...] = ()


def _header(kind: int, number: int, body_bytes: int, num_refs: int = 0) -> bytes:
    return _HEADER.pack(kind, 0, num_refs, _MARK, number, body_bytes)


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
        if at > 0 and not self._skip_noise:
            raise WireError("the other side did not greet")
        if at < 0:
            if not (self._skip_noise or MAGIC.startswith(self._data)):
                raise WireError("the other side did not greet")
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
            raise WireError(f"the greeting is no JSON: {error}") from error
        if not isinstance(meta, dict):
            raise WireError("the greeting is no object")
        self.rest = self._data[start + length :]
        return kind, meta


# ----------------------------------------------------------------------------------------------------- sending
class Outbox:
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
        self._blob: _Record | None = None  # being written, behind ``_parts``
        self._blob_at = 0
        self._waiting_bytes = 0
        self._waiting_blobs = 0
        self._shared: dict[tuple[int, int], tuple[int, Blob]] = {}  # files of the last call that the other side keeps
        self._shared_call = 0

    @property
    def full(self) -> bool:
        """Is so much on its way that no more should be taken in?"""
        return self._waiting_bytes > _WINDOW_BYTES or self._waiting_blobs > _WINDOW_BLOBS

    @property
    def empty(self) -> bool:
        """Did the other side pass everything on?"""
        return not self._unsent and not self._sent

    @property
    def written(self) -> bool:
        """Is there nothing to write at this moment?"""
        pending = self._parts or self._unsent or self.greeting or self.ping_due
        return not pending and self._blob is None

    def add(self, received: Sequence[RawFrame]) -> None:
        """Take frames, and their descriptors."""
        plain: list[bytes] = []
        for frame in received:
            if not frame.fds:
                plain.append(frame.data)
                continue
            self._add_plain(plain)
            plain = []
            if frame.kind != frames.CALL or frame.call != self._shared_call:
                self.forget()
            self._shared_call = frame.call
            refs = b"".join(_REF.pack(self._add_blob(fd)) for fd in frame.fds)
            self._append(FRAMES, refs, frame.data, num_refs=len(frame.fds))
            if frame.kind != frames.CALL:  # a CALL may go to more ranks; other files are for one frame, and may change
                self.forget()
        self._add_plain(plain)

    def forget(self) -> None:
        """Files sent so far are in no later frame: the other side need not keep them."""
        if self._shared:
            for _number, blob in self._shared.values():
                blob.drop()
            self._shared.clear()
            self._append(FORGET)

    def end(self, reason: str) -> None:
        """Nothing comes after this."""
        self.forget()
        self._append(END, data=reason.encode(errors="replace"))

    def acknowledge(self, number: int) -> None:
        """The other side passed on everything up to this record."""
        self._acknowledged = max(self._acknowledged, number)
        while self._sent and self._sent[0].number <= number and self._sent[0] is not self._blob:
            self._release(self._sent.popleft())

    def rewind(self, received: int) -> None:
        """A new link: go on behind the last record that arrived whole.

        Raises:
            WireError: that is none of ours, or one that is gone.
        """
        if not self._acknowledged <= received <= self._numbers:
            raise WireError(f"the other side has record {received}, of {self._acknowledged} to {self._numbers}")
        self._parts.clear()
        self._blob = None
        while self._sent and self._sent[-1].number > received:
            self._unsent.appendleft(self._sent.pop())

    def write(self, fd: int) -> bool:
        """Write what the descriptor takes; returns whether nothing is left. Raises ``OSError`` where it is broken."""
        left = _TURN_BYTES
        with contextlib.suppress(BlockingIOError):
            while left > 0:
                if self._parts:
                    left -= self._write_parts(fd)
                elif self._blob is not None:
                    left -= self._write_blob(fd, self._blob, left)
                elif self.written:
                    return True
                else:
                    self._fill()
        return False

    def close(self) -> None:
        """Let go of everything."""
        for record in (*self._sent, *self._unsent):
            self._release(record)
        self._sent.clear()
        self._unsent.clear()
        for _number, blob in self._shared.values():
            blob.drop()
        self._shared.clear()

    def _add_plain(self, plain: list[bytes]) -> None:
        if plain:
            self._append(FRAMES, data=plain[0] if len(plain) == 1 else b"".join(plain))

    def _add_blob(self, fd: int) -> int:
        """The number under which the other side knows the file, which it will be sent if need be."""
        status = os.fstat(fd)
        key = status.st_dev, status.st_ino
        if key in self._shared:
            os.close(fd)
            return self._shared[key][0]
        blob = Blob(fd)
        number = self._append(BLOB, blob=blob, blob_bytes=status.st_size)
        self._shared[key] = number, blob.hold()  # held, so that no other file gets its inode meanwhile
        return number

    def _append(
        self,
        kind: int,
        refs: bytes = b"",
        data: bytes = b"",
        *,
        num_refs: int = 0,
        blob: Blob | None = None,
        blob_bytes: int = 0,
    ) -> int:
        self._numbers += 1
        head = _header(kind, self._numbers, len(refs) + len(data) + blob_bytes, num_refs) + refs
        self._unsent.append(_Record(self._numbers, head, data, blob, blob_bytes))
        self._waiting_bytes += len(data)
        self._waiting_blobs += blob is not None
        return self._numbers

    def _release(self, record: _Record) -> None:
        self._waiting_bytes -= len(record.data)
        if record.blob is not None:
            self._waiting_blobs -= 1
            record.blob.drop()

    def _fill(self) -> None:
        """The next things to write: up to the next blob."""
        if self.greeting:
            self._parts.append(memoryview(self.greeting))
            self.greeting = b""
        if self.ping_due:
            self._parts.append(memoryview(_header(PING, self.passed_on, 0)))
            self.ping_due = False
        while self._unsent and len(self._parts) < _BATCH and self._blob is None:
            record = self._unsent.popleft()
            self._sent.append(record)
            self._parts.append(memoryview(record.head))
            if record.data:
                self._parts.append(memoryview(record.data))
            if record.blob is not None:
                self._blob, self._blob_at = record, 0

    def _write_parts(self, fd: int) -> int:
        written = left = os.writev(fd, list(self._parts)[: 2 * _BATCH])
        while left:
            part = self._parts.popleft()
            if left < len(part):
                self._parts.appendleft(part[left:])
                break
            left -= len(part)
        return written

    def _write_blob(self, fd: int, record: _Record, most: int) -> int:
        assert record.blob is not None
        left = record.blob_bytes - self._blob_at
        # By the kernel: the bytes never come through here. The file does not change before it has arrived.
        written = os.sendfile(fd, record.blob.fd, self._blob_at, min(left, most)) if left else 0
        if left and not written:
            raise OSError(f"a memory file ended {left} bytes early")
        self._blob_at += written
        if written == left:
            self._blob = None
        return written


# --------------------------------------------------------------------------------------------------- receiving
class _Filling:
    """A blob of which part has arrived."""

    def __init__(self, number: int, length: int) -> None:
        self.number = number
        self.left = length
        self.fd = os.memfd_create("atoll", os.MFD_CLOEXEC)
        self._at = 0

    def put(self, data: bytes | memoryview) -> None:
        while data:
            num = os.pwrite(self.fd, data, self._at)
            self._advance(num)
            data = data[num:]

    def read(self, fd: int) -> bool:
        """One read; whether there was anything."""
        if stat.S_ISFIFO(os.fstat(fd).st_mode):  # by the kernel, at twice the speed
            num = os.splice(fd, self.fd, self.left, offset_dst=self._at)
            self._advance(num)
            return num > 0
        data = os.read(fd, min(self.left, _READ_BYTES))
        self.put(data)
        return bool(data)

    def _advance(self, num: int) -> None:
        self._at += num
        self.left -= num


class Inbox:
    """Cuts what a link delivers into records. ``received`` is the number of the last whole one."""

    def __init__(self) -> None:
        self.received = 0
        self._data = bytearray()
        self._filling: _Filling | None = None
        self._blobs: dict[int, Blob] = {}

    def rewind(self, rest: bytes) -> None:
        """A new link: half a record is void, the other side sends it again."""
        self._data = bytearray(rest)
        if self._filling is not None:
            os.close(self._filling.fd)
            self._filling = None

    def read(self, fd: int) -> bool:
        """One read; whether there was anything, or the stream is at its end. ``cut`` has what came of it.

        Raises:
            OSError: the link broke, or ``BlockingIOError``.
        """
        if self._filling is not None and self._filling.left:
            return self._filling.read(fd)
        data = os.read(fd, _READ_BYTES)
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
                if self._filling is not None:
                    at += self._fill(at)
                    if self._filling is not None:
                        return
                if len(self._data) - at < _HEADER.size:
                    return
                kind, num_refs, number, length = self._header(at)
                if kind == BLOB:
                    self._filling = _Filling(number, length)
                    at += _HEADER.size
                    continue
                end = at + _HEADER.size + length
                if len(self._data) < end:
                    return
                with memoryview(self._data) as data, data[at + _HEADER.size : end] as part:
                    body = bytes(part)
                at = end
                yield from self._take(kind, number, num_refs, body)
        finally:
            del self._data[:at]

    def close(self) -> None:
        """Let go of everything."""
        self.rewind(b"")
        self._forget()

    def _header(self, at: int) -> tuple[int, int, int, int]:
        kind, zero, num_refs, mark, number, length = _HEADER.unpack_from(self._data, at)
        if mark != _MARK or zero or not PING <= kind <= END:
            raise WireError("bytes that are no record came over the link")
        if kind != PING and number != self.received + 1:
            raise WireError(f"record {number} came over the link where {self.received + 1} was expected")
        if kind != BLOB and not num_refs * _REF.size <= length <= _MAX_FRAMES_BYTES:
            raise WireError(f"a record of {length} bytes came over the link")
        return kind, num_refs, number, length

    def _take(self, kind: int, number: int, num_refs: int, body: bytes) -> Iterator[Arrived]:
        if kind == PING:
            yield Arrived(PING, number, b"")
            return
        refs_bytes = num_refs * _REF.size
        refs = [ref for (ref,) in _REF.iter_unpack(body[:refs_bytes])]
        if not self._blobs.keys() >= set(refs):
            raise WireError(f"record {number} names a blob that did not come")
        self.received = number
        if kind == FORGET:
            self._forget()
        else:
            blobs = tuple(self._blobs[ref].hold() for ref in refs)
            yield Arrived(kind, number, body[refs_bytes:] if refs else body, blobs)

    def _fill(self, at: int) -> int:
        """Put what was read behind a blob's header into it; returns how much."""
        filling = self._filling
        assert filling is not None
        num = min(filling.left, len(self._data) - at)
        if num:
            with memoryview(self._data) as data, data[at : at + num] as part:
                filling.put(part)
        if not filling.left:
            self._blobs[filling.number] = Blob(filling.fd)
            self.received = filling.number
            self._filling = None
        return num

    def _forget(self) -> None:
        for blob in self._blobs.values():
            blob.drop()
        self._blobs.clear()
