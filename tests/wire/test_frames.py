"""Frames: any split of a stream gives the same ones, and what is no frame is refused and never hangs."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.wire import frames
from atoll.wire.frames import HEADER, Frame, Parser, RawFrame, WireError, pack, receive, send_all, send_some, split_body

kinds = st.sampled_from(sorted(frames.KINDS))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
metas = st.none() | st.dictionaries(st.text(max_size=5), json_values, max_size=3)
messages = st.tuples(
    kinds, st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), metas, st.lists(st.binary(max_size=40), max_size=3)
)


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return (data[start:end] for start, end in pairwise(edges))


@given(st.lists(messages, max_size=6), st.lists(st.integers(0, 10_000), max_size=12))
def test_any_split_gives_the_same_frames(sent: list[tuple], cuts: list[int]) -> None:
    stream = b"".join(pack(kind, rank, call, meta, rest) for kind, rank, call, meta, rest in sent)
    parser = Parser()
    got = [frame.parsed() for piece in pieces(stream, cuts) for frame in parser.feed(piece)]
    assert [(f.kind, f.rank, f.call, f.meta, bytes(f.rest)) for f in got] == [
        (kind, rank, call, meta or {}, b"".join(rest)) for kind, rank, call, meta, rest in sent
    ]
    assert parser.feed(b"") == []


@given(messages, st.integers(1, 60))
def test_a_truncated_frame_is_waited_for(message: tuple, missing: int) -> None:
    kind, rank, call, meta, rest = message
    data = pack(kind, rank, call, meta, rest)
    parser = Parser()
    cut = max(0, len(data) - missing)
    assert parser.feed(data[:cut]) == []
    assert len(parser.feed(data[cut:])) == 1


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
@settings(max_examples=200)
def test_garbage_is_refused_or_waited_for(garbage: bytes, cuts: list[int]) -> None:
    parser = Parser()
    try:
        for piece in pieces(garbage, cuts):
            for raw in parser.feed(piece):
                assert isinstance(raw.parsed(), Frame)
    except WireError:
        pass


@given(messages, st.integers(0, 10_000), st.integers(1, 255))
@settings(max_examples=200)
def test_a_flipped_byte_is_another_frame_or_refused(message: tuple, at: int, flip: int) -> None:
    kind, rank, call, meta, rest = message
    data = bytearray(pack(kind, rank, call, meta, rest))
    data[at % len(data)] ^= flip
    parser = Parser()
    try:
        for raw in parser.feed(bytes(data)):
            raw.parsed()
    except WireError:
        pass


@given(st.binary(max_size=100))
def test_a_body_is_taken_apart_or_refused(body: bytes) -> None:
    try:
        meta, rest = split_body(memoryview(body))
    except WireError:
        return
    assert isinstance(meta, dict)
    assert len(rest) <= len(body)


@pytest.mark.parametrize(
    ("length", "kind", "num_fds"),
    [(4, 0, 0), (4, 99, 0), (4, frames.LOG, 65), (1 << 31, frames.LOG, 0)],
    ids=["kind 0", "unknown kind", "too many descriptors", "longer than any frame"],
)
def test_headers_that_can_not_be(length: int, kind: int, num_fds: int) -> None:
    with pytest.raises(WireError):
        Parser().feed(HEADER.pack(length, kind, 0, num_fds, 0, 0))


def test_descriptors_that_did_not_come() -> None:
    with pytest.raises(WireError, match="2 descriptors came with 0"):
        Parser().feed(pack(frames.RESULT, num_fds=2))


def test_a_head_that_is_no_object() -> None:
    body = b"[1,2]"
    raw = RawFrame(frames.LOG, 0, 0, 0, HEADER.pack(9, frames.LOG, 0, 0, 0, 0) + b"\5\0\0\0" + body, ())
    with pytest.raises(WireError, match="list"):
        raw.parsed()


def test_a_head_that_nests_for_ever() -> None:
    body = b"[" * 100_000
    data = HEADER.pack(4 + len(body), frames.LOG, 0, 0, 0, 0) + len(body).to_bytes(4, "little") + body
    (raw,) = Parser().feed(data)
    with pytest.raises(WireError):
        raw.parsed()


@pytest.fixture
def channel() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    with a, b:
        yield a, b


def test_descriptors_stay_with_their_frames(channel: tuple[socket.socket, socket.socket]) -> None:
    a, b = channel
    files = [os.memfd_create(f"test{n}") for n in range(6)]
    try:
        for n, fd in enumerate(files):
            os.write(fd, str(n).encode())
        send_all(a, pack(frames.RESULT, 0, 1, {"n": 0}, num_fds=2), files[:2])
        send_all(a, pack(frames.LOG, 0, 2))
        send_all(a, pack(frames.RESULT, 0, 3, {"n": 1}, [b"x" * 1000], num_fds=1), files[2:3])
        send_all(a, pack(frames.VALUE, 0, 4, num_fds=3), files[3:])
        parser, got = Parser(), []
        while len(got) < 4:
            got += parser.feed(*receive(b))
        contents = []
        for frame in got:
            contents.append([os.pread(fd, 9, 0).decode() for fd in frame.fds])
            for fd in frame.fds:
                assert not os.get_inheritable(fd)
                os.close(fd)
        assert contents == [["0", "1"], [], ["2"], ["3", "4", "5"]]
    finally:
        for fd in files:
            os.close(fd)


def test_unclaimed_descriptors_are_closed(channel: tuple[socket.socket, socket.socket]) -> None:
    a, b = channel
    before = len(os.listdir("/proc/self/fd"))
    fd = os.memfd_create("test")
    send_some(a, pack(frames.RESULT, num_fds=1)[:-1], [fd])
    os.close(fd)
    parser = Parser()
    assert parser.feed(*receive(b)) == []
    assert len(os.listdir("/proc/self/fd")) == before + 1
    parser.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_frame_larger_than_the_sockets_buffer(channel: tuple[socket.socket, socket.socket]) -> None:
    a, b = channel
    data = pack(frames.RESULT, 1, 2, {"k": 1}, [os.urandom(5 << 20)])
    sender = threading.Thread(target=send_all, args=(a, data))
    sender.start()
    parser, got = Parser(), []
    while not got:
        got = parser.feed(*receive(b))
    sender.join()
    assert got[0].data == data


def test_the_end_of_a_channel_is_empty_bytes(channel: tuple[socket.socket, socket.socket]) -> None:
    a, b = channel
    a.shutdown(socket.SHUT_WR)
    assert receive(b) == (b"", [])


def test_names_are_unique() -> None:
    assert len({kind.name for kind in frames.KINDS.values()}) == len(frames.KINDS)
    assert frames.KINDS[frames.CALL].name == "CALL"
    assert "RESULT" in repr(Parser().feed(pack(frames.RESULT, 3, 4, {"x": 1}))[0].parsed())


def test_what_came_before_bytes_that_are_no_frame_is_not_lost() -> None:
    parser = Parser()
    whole = pack(frames.RESULT, 1, 2, {"a": 1})
    assert [raw.parsed().meta for raw in parser.feed(whole + b"\xff" * HEADER.size)] == [{"a": 1}]
    with pytest.raises(WireError):
        parser.feed(b"")
