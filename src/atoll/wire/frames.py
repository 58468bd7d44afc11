"""The one frame format, spoken by driver, agent and rank. Standard library only: the agent ships with it.

A frame is a fixed header, then a body::

    body_bytes u32 | kind u8 | flags u8 | num_fds u16 | rank u32 | call u64 | body

A body is a JSON object with its length before it, then raw bytes: ``meta_bytes u32 | meta | rest``. File
descriptors (memory files that hold large buffers) travel beside the first byte of their frame.
"""

from __future__ import annotations

import array
import functools
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

VERSION: Final = 4
HEADER: Final = struct.Struct("<IBBHIQ")
FLAGS_AT: Final = 5
EVERY: Final = 0xFFFFFFFF  # as the rank of TERM and KILL: all of them
# Flags of RESULT and ERROR: the rank still holds the arguments' memory; torch is loaded in it; it can't be used again;
# a framework is loaded that can be set up only before its first use.
KEPT: Final = 2
HAS_TORCH: Final = 4
SPENT: Final = 8
HAS_FRAMEWORK: Final = 16
RETURNED: Final = "returned"  # what a rank offers that waits for the others before it leaves, and will make no group
_LENGTH: Final = struct.Struct("<I")
_SMALLEST: Final = HEADER.size + _LENGTH.size
_MAX_FDS: Final = 64
_MAX_BODY_BYTES: Final = 1 << 28  # large payloads travel in memory files: a body beyond not a frame of ours
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_MAX_FDS * 4)
_CHUNK: Final = 1 << 16  # a larger buffer would be mapped and unmapped by the allocator at every read


class Kind(NamedTuple):
    """One kind of frame: who sends it to whom, and the fields of its JSON object. A field may be left out."""

    name: str
    direction: str
    fields: tuple[str, ...]


KINDS: Final[dict[int, Kind]] = {}


def _kind(number: int, name: str, direction: str, *fields: str) -> int:
    KINDS[number] = Kind(name, direction, fields)
    return number


_EXIT = ("exit_code", "signal", "oom", "tail", "killed", "fault")
# What a node's agent is told.
SETUP: Final = _kind(
    1, "SETUP", "driver → agent",
    "node", "tag", "tmp_dir", "ttl_s", "lease", "task",
)  # fmt: skip
# A rank has a channel: on this machine its ends of that, standard output and error come along.
START: Final = _kind(2, "START", "driver → agent", "argv", "env", "cwd", "script", "shell", "channel")
KILL: Final = _kind(3, "KILL", "driver → agent", "fault")
STACKS: Final = _kind(4, "STACKS", "driver → agent → driver", "ranks")
SHUTDOWN: Final = _kind(5, "SHUTDOWN", "driver → agent", "busy")
TERM: Final = _kind(7, "TERM", "driver → agent", "signal", "whole")
LEASE: Final = _kind(8, "LEASE", "driver → agent", "gpus", "count", "holder", "round")
CANCEL: Final = _kind(11, "CANCEL", "driver → agent")  # which interrupts the rank if it still runs that call
# What a rank is told: over its own channel on this machine, else through its agent.
CALL: Final = _kind(
    10, "CALL", "driver → rank",
    "job_id", "function", "arguments", "broadcast", "head_port", "all_have_torch", "is_pure",
    "function_payload", "keep_function", "forget", "path",
)  # fmt: skip
CREDIT: Final = _kind(12, "CREDIT", "driver → rank", "num")
CLOSE: Final = _kind(13, "CLOSE", "driver → rank")
GROUP: Final = _kind(14, "GROUP", "driver → rank", "go", "offers")
TO_RANK: Final = frozenset((CALL, CREDIT, CLOSE, GROUP))
# What a rank says, the same way.
HELLO: Final = _kind(20, "HELLO", "rank → driver", "port")
RESULT: Final = _kind(21, "RESULT", "rank → driver", "payload", "notes")
ERROR: Final = _kind(22, "ERROR", "rank → driver", "payload", "notes", "cancelled")
VALUE: Final = _kind(23, "VALUE", "rank → driver", "payload", "notes", "end")
STREAM: Final = _kind(24, "STREAM", "rank → driver")
REPORT: Final = _kind(25, "REPORT", "rank → driver", "payload", "notes", "checkpoint")
WANT_GROUP: Final = _kind(26, "WANT_GROUP", "rank → driver", "offer")
FROM_RANK: Final = frozenset(KINDS) & frozenset(range(HELLO, WANT_GROUP + 1))
# What an agent says.
AGENT: Final = _kind(30, "AGENT", "agent → driver", "version", "pid", "place", "ended")
LOG: Final = _kind(31, "LOG", "agent → driver")
EXIT: Final = _kind(32, "EXIT", "agent → driver", *_EXIT)
STARTED: Final = _kind(33, "STARTED", "agent → driver", "pid")
LEASED: Final = _kind(34, "LEASED", "agent → driver", "round", "gpus", "why")
# Between a named pool's server and its clients, beside those of calls above.
ATTACH: Final = _kind(40, "ATTACH", "client → server", "version", "given", "events")
ATTACHED: Final = _kind(
    41, "ATTACHED", "server → client", "pool_id", "node_of", "log_dir", "pid", "python", "extra_path"
)
REFUSED: Final = _kind(42, "REFUSED", "server → client", "why")
SUBMIT: Final = _kind(43, "SUBMIT", "client → server", "detach")
ACCEPTED: Final = _kind(44, "ACCEPTED", "server → client", "ranks", "detached")
DONE: Final = _kind(45, "DONE", "server → client", "kept", "failed")
EVENT: Final = _kind(46, "EVENT", "server → client")
DOWN: Final = _kind(47, "DOWN", "client → server")
PING: Final = _kind(48, "PING", "client → server → client")
# Between a cluster's supervisor, or the program that answers for it, and those who ask; LOG has bytes of a job's log.
ASK: Final = _kind(50, "ASK", "client → supervisor", "op", "args", "kwargs")
ANSWER: Final = _kind(
    51, "ANSWER", "supervisor → client", "version", "pid", "value", "callback", "note", "error", "message"
)


@dataclass(slots=True)
class CallHeader:
    """The fields of a CALL frame.

    Attributes:
        function: digest of the function; its payload comes along where the rank lacks it.
        arguments, function_payload: tables of the payloads that follow, see ``payloads``.
        is_pure: the function holds nothing that a call could change: the rank may keep it rebuilt.
        keep_function: the rank may keep the payload, under the digest.
        forget: digest of a kept function that it may drop.
        path: its import path from now on.
        all_have_torch: some ranks have torch loaded, so all import it.
    """

    job_id: str
    function: str
    arguments: dict[str, Any]
    broadcast: bool = False
    head_port: int = 0
    all_have_torch: bool = False
    is_pure: bool = False
    function_payload: dict[str, Any] | None = None
    keep_function: bool = False
    forget: str | None = None
    path: Sequence[str] | None = None

    def to_wire(self, call: int, rest: Sequence[bytes | memoryview], num_fds: int) -> bytearray:
        """The frame, for rank 0; fields that say nothing are left out."""
        if self.function_payload or self.forget or self.path or len(self.arguments) > 1:
            fields = {name: value for name in self.__slots__ if (value := getattr(self, name))}
            text = _encode_json(fields).encode()
        else:
            rest_text = _warm_call_text(
                self.function, self.arguments["head"], self.broadcast, self.head_port, self.all_have_torch, self.is_pure
            )
            text = b'{"job_id":"%b",%b' % (self.job_id.encode(), rest_text)
        size = _LENGTH.size + len(text)
        for part in rest:
            size += len(part)
        head = HEADER.pack(size, CALL, 0, num_fds, 0, call)
        return bytearray().join((head, _LENGTH.pack(len(text)), text, *rest))

    @classmethod
    def from_wire(cls, fields: dict[str, Any]) -> CallHeader:
        """The header that a frame has.

        Raises:
            TypeError: another version's.
        """
        return cls(**fields)


# Made once: json.dumps would make an encoder a frame, and json.loads would look for encodings and white space.
_encode_json = json.JSONEncoder(separators=(",", ":")).encode
_decode_json = json.JSONDecoder().raw_decode


@functools.lru_cache(256)
def _warm_call_text(
    function: str, head: int, broadcast: bool, head_port: int, all_have_torch: bool, is_pure: bool
) -> bytes:
    """What the JSON of a call has after its id, where the rank has the function: the same for most calls."""
    header = CallHeader("", function, {"head": head}, broadcast, head_port, all_have_torch, is_pure)
    fields = {name: value for name in header.__slots__ if (value := getattr(header, name))}
    return _encode_json(fields).encode()[1:]


@functools.lru_cache(256)
def _payload_text(head: int) -> bytes:
    return _encode_json({"payload": {"head": head}}).encode()


def pack_payload(kind: int, rank: int, call: int, data: bytes) -> bytearray:
    """A frame of a small payload with nothing beside it: most results are."""
    text = _payload_text(len(data))
    length = _LENGTH.size + len(text) + len(data)
    return bytearray().join((HEADER.pack(length, kind, 0, 0, rank, call), _LENGTH.pack(len(text)), text, data))


def name_of(kind: int) -> str:
    """What to call a kind of frame."""
    return KINDS[kind].name if kind in KINDS else str(kind)


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
        return f"<{name_of(self.kind)} rank={self.rank} call={self.call} {self.meta}>"


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
        raise WireError(f"the head of a frame is not JSON: {error}") from error
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
            if kind not in KINDS or num_fds > _MAX_FDS or length > _MAX_BODY_BYTES:
                if frames:
                    break
                raise WireError(f"kind {kind}, {num_fds} descriptors, {length} bytes: not a frame")
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

    def receive(self, sock: socket.socket) -> list[Frame] | None:
        """The frames that are whole with what there is to read; None at its end. Fast for one that is all there is.

        Raises:
            OSError: it can't be read, or not without waiting.
            WireError: as ``feed``; frames before the bad one are dropped.
        """
        data, ancillary, _flags, _addr = sock.recvmsg(_CHUNK, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return None
        fds = _descriptors(ancillary) if ancillary else ()
        if not (self._data or fds or self._fds) and len(data) >= _SMALLEST:
            length, kind, flags, num_fds, rank, call = HEADER.unpack_from(data)
            (text_bytes,) = _LENGTH.unpack_from(data, HEADER.size)
            if length == len(data) - HEADER.size and not num_fds and kind in KINDS and text_bytes:
                end = _SMALLEST + text_bytes
                try:
                    fields = _decode_json(data[_SMALLEST:end].decode())[0]
                except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
                    raise WireError(f"the head of a frame is not JSON: {error}") from error
                if type(fields) is dict:
                    return [Frame(kind, rank, call, fields, memoryview(data)[end:], (), flags)]
        return [raw.parsed() for raw in self.feed(data, fds)]

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
    data, ancillary, _flags, _addr = sock.recvmsg(_CHUNK, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    return data, _descriptors(ancillary)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found = array.array("i")
            found.frombytes(payload[: len(payload) - len(payload) % found.itemsize])
            fds.extend(found)
    return fds
