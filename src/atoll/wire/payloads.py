"""Payloads on a local channel: small ones inside the frame, large ones in a memory file passed beside it.

A rank maps the file privately, so its arrays are writable, cost no copy, and a write touches only the page it
hits. The driver keeps a file for the next call once every rank has let go of it: pages already touched are what
makes the second call fast.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.wire.codec import Payload

_INLINE_BYTES = 1 << 17  # below this, copying through the socket costs less than making a memory file
_READ_BYTES = 1 << 22  # below this a received file is read, not mapped
_ALIGN = 64
_QUEUED_BYTES = 1 << 26  # above this, a payload gets a memory file however many there are
_KEEP_BYTES = 2 << 30  # memory files kept for reuse, together
_KEEP_S = 30.0  # an unused one is let go at the next call after this long


@dataclass(slots=True, weakref_slot=True, eq=False)
class Segment:
    """A memory file; ``capacity`` bytes of it are allocated. A foreign one is another process's to use again."""

    fd: int
    capacity: int
    idle_since: float = 0.0
    foreign: bool = False

    def close(self) -> None:
        """Give the file up; mappings of it stay valid."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


@dataclass(slots=True)
class Encoded:
    """A payload ready to send: ``table`` for the frame's JSON, ``inline`` for its rest, ``segment`` goes beside it."""

    table: dict[str, Any]
    inline: list[bytes | memoryview] = field(default_factory=list)
    segment: Segment | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Encoded, (self.table, self.inline)  # a segment goes beside the pickle, too


class Arena:
    """Memory files for sending, kept warm between calls. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[Segment] = []
        self._made: weakref.WeakSet[Segment] = weakref.WeakSet()
        self._most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
        self._lock = threading.Lock()

    def encode(self, payload: Payload) -> Encoded:
        """Lay a payload out for sending; large ones are copied once, into a memory file."""
        if not payload.buffers and len(payload.chunks) == 1 and len(payload.chunks[0]) <= _INLINE_BYTES:
            return Encoded({"head": len(payload.chunks[0])}, [payload.chunks[0]])
        sizes = [len(buffer) for buffer in payload.buffers]
        head_bytes = payload.head_bytes
        table: dict[str, Any] = {"head": head_bytes, "buffers": sizes} if sizes else {"head": head_bytes}
        total = head_bytes + sum(sizes)
        if total <= _INLINE_BYTES:
            return Encoded(table, [payload.head, *payload.buffers])
        segment = self._take(sum(map(_aligned, [head_bytes, *sizes])))
        if segment is None:  # many calls wait: each one's file would hold a descriptor
            return Encoded(table, [payload.head, *payload.buffers])
        offset = 0
        try:
            for chunk in payload.chunks:
                _write(segment.fd, memoryview(chunk), offset)
                offset += len(chunk)
            offset = _aligned(head_bytes)
            for part in payload.buffers:
                _write(segment.fd, part, offset)
                offset += _aligned(len(part))
        except BaseException:
            segment.close()
            raise
        table["file"] = 1
        return Encoded(table, [], segment)

    def give_back(self, segment: Segment) -> None:
        """Nobody maps this file any more: keep it for the next call."""
        if segment.foreign:
            segment.close()
            return
        segment.idle_since = time.monotonic()
        with self._lock:
            self._free.append(segment)
        self.trim()

    def trim(self, older_than_s: float = _KEEP_S) -> None:
        """Let go of files that have not been used for a while, or are too many."""
        now = time.monotonic()
        with self._lock:
            self._free.sort(key=lambda segment: segment.idle_since, reverse=True)
            kept: list[Segment] = []
            total = 0
            for segment in self._free:
                total += segment.capacity
                if total > _KEEP_BYTES or now - segment.idle_since > older_than_s:
                    segment.close()
                    total -= segment.capacity
                else:
                    kept.append(segment)
            self._free = kept

    def close(self) -> None:
        """Give every file up."""
        with self._lock:
            free, self._free = self._free, []
        for segment in free:
            segment.close()

    def _take(self, size: int) -> Segment | None:
        with self._lock:
            fitting = [s for s in self._free if size <= s.capacity <= 2 * size + (1 << 20)]
            if fitting:
                best = min(fitting, key=lambda segment: segment.capacity)
                self._free.remove(best)
                return best
        self.trim()
        if size <= _QUEUED_BYTES and len(self._made) >= self._most:
            return None
        fd = os.memfd_create("atoll", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        segment = Segment(fd, size)
        self._made.add(segment)
        return segment


def decode_parts(
    table: dict[str, Any], rest: memoryview, fds: Sequence[int]
) -> tuple[memoryview, list[memoryview], weakref.ref[Any] | None]:
    """Head and buffers of a payload as received, and a reference that dies when nothing maps its file any more.

    Takes ownership of the descriptor.
    """
    if len(table) == 1:
        return rest[: table["head"]], [], None
    sizes = [table["head"], *table.get("buffers", ())]
    if not table.get("file"):
        # Frames are immutable bytes; buffers are copied so that arrays built on them can be written to.
        parts = []
        offset = 0
        for index, size in enumerate(sizes):
            part = rest[offset : offset + size]
            parts.append(part if index == 0 else memoryview(bytearray(part)))
            offset += size
        return parts[0], parts[1:], None
    total = sum(map(_aligned, sizes))
    if total <= _READ_BYTES:
        return *_read_parts(sizes, fds[0]), None
    try:
        mapping = _map(fds[0], total)
    finally:
        os.close(fds[0])
    view = memoryview(mapping).cast("B")
    parts = []
    offset = 0
    for size in sizes:
        parts.append(view[offset : offset + size])
        offset += _aligned(size)
    return parts[0], parts[1:], weakref.ref(mapping)


def _map(fd: int, size: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Maps a file privately, as long as the result or a view of it lives.

    Not by ``mmap.mmap``: before Python 3.13 that holds a descriptor for each mapping, and a list of large results would
    use them up.
    """
    if os.fstat(fd).st_size < size:  # reading past its end would end this process
        raise ValueError(f"a result of {size} bytes came in a file of {os.fstat(fd).st_size}")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        problem = ctypes.get_errno()
        raise OSError(problem, f"a result of {size} bytes can't be mapped: {os.strerror(problem)}")
    # ctypes keeps a type for each length for good: only powers of two. Nobody looks past `size`.
    mapping = (ctypes.c_ubyte * (1 << (size - 1).bit_length())).from_address(address)
    weakref.finalize(mapping, libc.munmap, address, size).atexit = False
    return mapping


def _read_parts(sizes: Sequence[int], fd: int) -> tuple[memoryview, list[memoryview]]:
    """The parts of a file that is not worth a mapping."""
    parts = []
    offset = 0
    try:
        for size in sizes:
            part = bytearray(size)
            view = memoryview(part)
            done = 0
            while done < size:
                done += os.preadv(fd, [view[done:]], offset + done)
            parts.append(view)
            offset += _aligned(size)
    finally:
        os.close(fd)
    return parts[0], parts[1:]


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN or _ALIGN


def _write(fd: int, part: memoryview, offset: int) -> None:
    while len(part):
        written = os.pwrite(fd, part[: 1 << 30], offset)
        part = part[written:]
        offset += written
