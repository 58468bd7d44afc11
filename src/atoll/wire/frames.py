"""The one frame format, spoken by driver, agent and rank. Standard library only: the agent ships with it.

A frame is a fixed header, then a body::

    body_bytes u32 | kind u8 | flags u8 | num_fds u16 | rank u32 | call u64 | body

A body is a JSON object with its length before it, then raw bytes: ``meta_bytes u32 | meta | rest``. File
descriptors (memory files that hold large buffers) travel beside the first byte of their frame.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

VERSION: Final = 2
HEADER: Final = struct.Struct("<IBBHIQ")
FLAGS_AT: Final = 5
# Flags of RESULT and ERROR: the rank still holds the arguments' memory; torch is loaded in it; it can't be used again.
KEPT: Final = 2
HAS_TORCH: Final = 4
SPENT: Final = 8
_LENGTH: Final = struct.Struct("<I")
_MAX_FDS: Final = 64
_MAX_BODY_BYTES: Final = 1 << 28  # large payloads travel in memory files: a body beyond this is no frame of ours
_CHUNK: Final = 1 << 16  # a larger buffer would be mapped and unmapped by the allocator at every read

# Driver to agent.
SETUP, SPAWN, KILL, STACKS, SHUTDOWN = 1, 2, 3, 4, 5
START, TERM, LEASE = 6, 7, 8  # processes of a task, and its GPUs
EVERY: Final = 0xFFFFFFFF  # as the rank of TERM and KILL: all of them
# Driver to rank, through the agent. CANCEL is the agent's to carry out: it sends the rank a signal.
CALL, CANCEL, CREDIT, CLOSE, GROUP = 10, 11, 12, 13, 14
# Rank to driver, through the agent.
HELLO, RESULT, ERROR, VALUE, STREAM, REPORT, WANT_GROUP = 20, 21, 22, 23, 24, 25, 26
# Agent to driver.
AGENT, LOG, EXIT, STARTED, LEASED = 30, 31, 32, 33, 34
# Client to keeper and back (named pools).
ATTACH, ATTACHED, REFUSED, SUBMIT, ACCEPTED, DONE, EVENT, DOWN, PING = 40, 41, 42, 43, 44, 45, 46, 47, 48

NAMES: Final = {
    value: name
    for name, value in list(globals().items())
    if type(value) is int
    and name.isupper()
    and name[0] != "_"
    and name not in ("VERSION", "FLAGS_AT", "KEPT", "HAS_TORCH", "SPENT", "EVERY")
}


# Made once: json.dumps would make an encoder a frame, and json.loads would look for encodings and white space.
_encode_json = json.JSONEncoder(separators=(",", ":")).encode
_decode_json = json.JSONDecoder().raw_decode


class WireError(Exception):
    """The other side spoke another version, or bytes that are no frame."""


class Frame(NamedTuple):
    """One message. ``meta`` is the body's JSON object, ``rest`` the bytes after it, ``fds`` what came beside it."""

    kind: int
    rank: int
    call: int
    meta: dict[str, Any]
    rest: memoryview
    fds: tuple[int, ...] = ()
    flags: int = 0

    def __repr__(self) -> str:
        return f"<{NAMES.get(self.kind, self.kind)} rank={self.rank} call={self.call} {self.meta}>"


class RawFrame(NamedTuple):
    """A frame as the agent relays it: header fields and the bytes untouched."""

    kind: int
    flags: int
    rank: int
    call: int
    data: bytes
    fds: tuple[int, ...]

    def parsed(self) -> Frame:
        """The frame with its body taken apart."""
        meta, rest = split_body(memoryview(self.data)[HEADER.size :])
        return Frame(self.kind, self.rank, self.call, meta, rest, self.fds, self.flags)


def split_body(body: memoryview) -> tuple[dict[str, Any], memoryview]:
    """Take a body apart into its JSON object and the bytes after it."""
    if len(body) < _LENGTH.size:
        return {}, body
    (num_bytes,) = _LENGTH.unpack_from(body)
    start = _LENGTH.size
    try:
        meta = _decode_json(str(body[start : start + num_bytes], "utf-8"))[0] if num_bytes else {}
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
        raise WireError(f"the head of a frame is no JSON: {error}") from error
    if not isinstance(meta, dict):
        raise WireError(f"the head of a frame is {type(meta).__name__}, not an object")
    return meta, body[start + num_bytes :]


def pack(
    kind: int,
    rank: int = 0,
    call: int = 0,
    meta: dict[str, Any] | None = None,
    rest: Sequence[bytes | memoryview] = (),
    num_fds: int = 0,
    flags: int = 0,
) -> bytes:
    """One frame as bytes."""
    text = _encode_json(meta).encode() if meta else b""
    length = _LENGTH.size + len(text) + sum(map(len, rest))
    return b"".join((HEADER.pack(length, kind, flags, num_fds, rank, call), _LENGTH.pack(len(text)), text, *rest))


class Parser:
    """Cuts a byte stream and a queue of descriptors into frames. No I/O."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, fds: Iterable[int] = ()) -> list[RawFrame]:
        """Add what was received; returns every frame that is now whole.

        Raises:
            WireError: the bytes are no frame; nothing more can be read from this stream. Frames before them are
                returned first.
        """
        self._data += data
        self._fds.extend(fds)
        frames: list[RawFrame] = []
        offset = 0
        buffer = self._data
        while len(buffer) - offset >= HEADER.size:
            length, kind, flags, num_fds, rank, call = HEADER.unpack_from(buffer, offset)
            if kind not in NAMES or num_fds > _MAX_FDS or length > _MAX_BODY_BYTES:
                if frames:
                    break
                raise WireError(f"kind {kind}, {num_fds} descriptors, {length} bytes: this is no frame")
            end = offset + HEADER.size + length
            if len(buffer) < end:
                break
            if num_fds > len(self._fds):
                if frames:
                    break
                raise WireError(f"a frame of {num_fds} descriptors came with {len(self._fds)}")
            taken = tuple(self._fds.popleft() for _ in range(num_fds))
            frames.append(RawFrame(kind, flags, rank, call, bytes(buffer[offset:end]), taken))
            offset = end
        if offset:
            del buffer[:offset]
        return frames

    def close(self) -> None:
        """Close descriptors that no frame claimed."""
        close_all(self._fds)
        self._fds.clear()


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors that nobody takes."""
    for fd in fds:
        os.close(fd)


def send_all(sock: socket.socket, data: bytes | bytearray, fds: Sequence[int] = ()) -> None:
    """Send bytes, with descriptors beside the first one, on a blocking socket."""
    sent = send_some(sock, data, fds)
    if sent < len(data):
        sock.sendall(memoryview(data)[sent:])


def send_some(sock: socket.socket, data: bytes | bytearray | memoryview, fds: Sequence[int] = ()) -> int:
    """One send; returns the number of bytes taken. Descriptors go with the first byte."""
    if not fds:
        return sock.send(data)
    return sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """What there is to read, and the descriptors that came with it (close-on-exec). Empty bytes mean the end."""
    data, ancillary, _flags, _addr = sock.recvmsg(_CHUNK, socket.CMSG_SPACE(_MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found = array.array("i")
            found.frombytes(payload[: len(payload) - len(payload) % found.itemsize])
            fds.extend(found)
    return data, fds
