"""Records and the relay between two local sockets: once, in order, intact, bounded, however the link is cut."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.wire import frames, resumable_protocol
from atoll.wire.frames import Parser, RawFrame, WireError, pack, receive, send_all
from atoll.wire.resumable_protocol import (
    END,
    FILE,
    FRAMES,
    HELLO,
    PING,
    REFUSED,
    Arrived,
    Greeter,
    RecordReceiver,
    RecordSender,
    greeting,
)
from atoll.wire.resumable_stream import Link, Relay


def memory_file(content: bytes) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(fd, content)
    return fd


def content_of(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size + 1, 0)


def frame(kind: int, call: int = 0, data: bytes = b"", fds: tuple[int, ...] = ()) -> RawFrame:
    return RawFrame(kind, 0, 0, call, pack(kind, 0, call, None, [data], len(fds)), fds)


class Wire:
    """What a sender writes, as bytes, and a receiver that is fed some of it."""

    def __init__(self) -> None:
        self.sender, self.receiver = RecordSender(), RecordReceiver()
        self.got: list[Arrived] = []
        self.stream = b""

    def write(self, most: int | None = None) -> None:
        """Take what the sender has, through a pipe."""
        done = False
        start = len(self.stream)
        while not done and (most is None or len(self.stream) - start < most):
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            done = self.sender.write(writer)
            os.close(writer)
            while piece := os.read(reader, 1 << 20):
                self.stream += piece
            os.close(reader)

    def read(self, num: int | None = None) -> None:
        """Feed the receiver that much of the stream, in one go as a pipe has it."""
        part, self.stream = (self.stream, b"") if num is None else (self.stream[:num], self.stream[num:])
        reader, writer = os.pipe()
        feeder = threading.Thread(target=lambda: (send_to(writer, part), os.close(writer)))
        feeder.start()
        try:
            while self.receiver.read(reader):
                self.got += self.receiver.cut()
        finally:
            os.close(reader)
            feeder.join()

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        for record in self.got:
            for fd in record.fds:
                os.close(fd)


def send_to(fd: int, data: bytes) -> None:
    view = memoryview(data)
    with contextlib.suppress(BrokenPipeError):
        while view:
            view = view[os.write(fd, view) :]


@pytest.fixture
def wire() -> Iterator[Wire]:
    with contextlib.closing(Wire()) as made:
        yield made


# ----------------------------------------------------------------------------------------------------- records
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 300_000), max_size=2), min_size=1, max_size=12),
    st.lists(st.integers(0, 2_000_000), max_size=6),
)
def test_everything_arrives_once_in_order_however_the_stream_is_cut(sizes: list[list[int]], cuts: list[int]) -> None:
    with contextlib.closing(Wire()) as wire:
        expected = []
        for number, files in enumerate(sizes):
            content = [bytes([number % 256]) * size for size in files]
            fds = tuple(map(memory_file, content))
            wire.sender.add([frame(frames.RESULT, number, b"x" * number, fds)])
            expected.append((pack(frames.RESULT, 0, number, None, [b"x" * number], len(fds)), content))
        for cut in cuts:
            wire.write(cut + 1)
            wire.read(cut)  # the rest is lost with the link
            wire.stream = b""
            wire.receiver.rewind(b"")
            wire.sender.rewind(wire.receiver.received)
        wire.write()
        wire.read()
        flat = [(record.data, [content_of(fd) for fd in record.fds]) for record in wire.got]
        assert b"".join(data for data, _ in flat) == b"".join(data for data, _ in expected)
        assert [files for _, files in flat if files] == [files for _, files in expected if files]
        wire.sender.acknowledge(wire.receiver.received)
        assert wire.sender.empty


def test_a_file_for_many_ranks_travels_once(wire: Wire) -> None:
    fd = memory_file(b"v" * 500_000)
    wire.sender.add([frame(frames.CALL, 7, b"", (os.dup(fd),)) for _ in range(4)])
    wire.write()
    assert 500_000 < len(wire.stream) < 502_000
    wire.sender.add([frame(frames.CALL, 8, b"", (os.dup(fd),))])  # another call: the file may have changed
    wire.write()
    assert len(wire.stream) > 1_000_000
    wire.read()
    assert [content_of(fd) for record in wire.got for fd in record.fds] == [b"v" * 500_000] * 5
    os.close(fd)


def test_a_file_of_a_result_may_change_between_frames(wire: Wire) -> None:
    fd = memory_file(b"one")
    wire.sender.add([frame(frames.VALUE, 7, b"", (os.dup(fd),))])
    wire.write()
    os.pwrite(fd, b"two", 0)
    wire.sender.add([frame(frames.VALUE, 7, b"", (os.dup(fd),))])
    wire.write()
    wire.read()
    assert [content_of(fd) for record in wire.got for fd in record.fds] == [b"one", b"two"]
    os.close(fd)


def test_what_is_on_its_way_is_bounded(wire: Wire) -> None:
    while not wire.sender.full:
        wire.sender.add([frame(frames.LOG, 0, b"l" * 100_000)])
    assert 16 << 20 <= wire.sender._waiting_bytes < 17 << 20
    wire.write()
    wire.read()
    assert wire.sender.full  # received is not passed on
    wire.sender.acknowledge(wire.receiver.received)
    assert not wire.sender.full
    for _ in range(300):
        wire.sender.add([frame(frames.RESULT, 0, b"", (memory_file(b""),))])
    assert wire.sender.full


def test_an_acknowledged_file_is_let_go(wire: Wire) -> None:
    before = len(os.listdir("/proc/self/fd"))
    wire.sender.add([frame(frames.CALL, 3, b"", (memory_file(b"a" * 1000),))])
    wire.write()
    wire.read()
    wire.sender.acknowledge(wire.receiver.received)
    wire.sender.add([frame(frames.CALL, 4)])  # one without files: those of the call before are not kept any longer
    wire.write()
    wire.read()
    for record in wire.got:
        for fd in record.fds:
            os.close(fd)
    wire.got.clear()
    assert len(os.listdir("/proc/self/fd")) == before


def header(kind: int, number: int, length: int, *, files: int = 0, mark: int = resumable_protocol._MARK) -> bytes:
    return resumable_protocol._HEADER.pack(kind, 0, files, mark, number, length)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x07" * 100, id="noise"),
        pytest.param(header(FRAMES, 1, 0, mark=1), id="another mark"),
        pytest.param(header(HELLO, 0, 0), id="a greeting in the middle"),
        pytest.param(header(END + 1, 1, 0), id="an unknown kind"),
        pytest.param(header(FRAMES, 2, 4) + b"abcd", id="one is missing"),
        pytest.param(header(FRAMES, 0, 0), id="an old number"),
        pytest.param(header(FRAMES, 1, 1 << 40), id="too long"),
        pytest.param(header(FRAMES, 1, 8, files=1) + b"\x09" * 8, id="a file that never came"),
    ],
)
def test_what_is_no_record_is_refused_and_what_came_before_counts(wire: Wire, data: bytes) -> None:
    wire.sender.ping_due = True
    wire.write()
    wire.stream += data
    with pytest.raises(WireError):
        wire.read()
    assert [record.kind for record in wire.got] == [PING]
    assert wire.receiver.received == 0


def test_a_position_that_cannot_be_is_refused(wire: Wire) -> None:
    wire.sender.add([frame(frames.LOG, 0, b"a")])
    wire.sender.add([frame(frames.LOG, 0, b"b")])
    wire.write()
    wire.sender.acknowledge(1)
    for received in (-1, 0, 3):
        with pytest.raises(WireError, match=f"record {received}"):
            wire.sender.rewind(received)
    wire.sender.rewind(1)


def test_half_a_file_is_void(wire: Wire) -> None:
    wire.stream = header(FILE, 1, 1000) + b"a" * 400
    wire.read()
    assert wire.receiver.received == 0
    wire.receiver.rewind(b"")
    wire.stream = header(FILE, 1, 3) + b"abc" + header(FRAMES, 2, 4, files=1) + b"abcd"
    wire.read()
    assert content_of(wire.got[0].fds[0]) == b"abc"


def test_a_greeting_is_found_behind_what_a_login_shell_prints() -> None:
    said = b"Welcome to h1!\n" * 20 + greeting(REFUSED, {"reason": "no"}) + b"rest"
    for step in (1, 7, len(said)):
        greeter = Greeter(skip_noise=True)
        got = [greeter.feed(said[at : at + step]) for at in range(0, len(said) - 4, step)]
        assert got[-1] == (REFUSED, {"reason": "no"})
    assert greeter.rest == b"rest"
    with pytest.raises(WireError):
        Greeter(skip_noise=False).feed(said)
    greeter = Greeter(skip_noise=True)
    assert [greeter.feed(b"noise\0atoll" * 6000) for _ in range(50)] == [None] * 50  # 3 MB
    assert greeter.feed(said) == (REFUSED, {"reason": "no"})


# ------------------------------------------------------------------------------------------------------- relay
class End(Relay):
    """One end, in a thread; ``user`` is what a gang or an agent would hold."""

    def __init__(self) -> None:
        self.user, local = socket.socketpair()
        super().__init__(local)
        self.lost: list[str] = []
        self.told: list[str] = []
        self._stopped = False
        self._wake = os.eventfd(0)
        self.loop.watch(self._wake, lambda *_: None)
        self.thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        while not self._stopped:
            self.loop.turn()
        self.close()

    def link_lost(self, link: Link, reason: str) -> None:
        self.lost.append(reason)
        link.close()

    def local_ended(self) -> None:
        self.say_end("through")

    def peer_ended(self, reason: str) -> None:
        self.told.append(reason)
        self.close_local()

    def stop(self) -> None:
        self._stopped = True
        os.eventfd_write(self._wake, 1)
        self.thread.join()
        os.close(self._wake)
        self.user.close()


def connect(a: End, b: End, *, sockets: bool) -> None:
    if sockets:
        one, other = socket.socketpair()
        a.adopt(Link(os.dup(one.fileno()), one.detach()), b.received)
        b.adopt(Link(os.dup(other.fileno()), other.detach()), a.received)
    else:
        (r1, w1), (r2, w2) = os.pipe(), os.pipe()
        a.adopt(Link(r1, w2), b.received)
        b.adopt(Link(r2, w1), a.received)


@pytest.fixture(params=["pipes", "a socket"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[End, End]]:
    pair = End(), End()
    connect(*pair, sockets=request.param == "a socket")
    for end in pair:
        end.thread.start()
    yield pair
    for end in pair:
        end.stop()


def collect(sock: socket.socket, num: int, into: list[RawFrame]) -> None:
    parser = Parser()
    while len(into) < num:
        data, fds = receive(sock)
        if not data:
            return
        into += parser.feed(data, fds)


def test_both_sides_send_much_at_once(ends: tuple[End, End]) -> None:
    num = 60
    random.seed(3)
    sent = [[random.randbytes(random.choice((10, 70_000, 900_000))) for _ in range(num)] for _ in ends]
    files = [random.randbytes(random.choice((0, 5, 70_000, 3_000_000))) for _ in range(num)]

    def send(end: End, bodies: list[bytes]) -> None:
        for number, (body, file) in enumerate(zip(bodies, files, strict=True)):
            fd = memory_file(file)
            send_all(end.user, pack(frames.RESULT, 0, number, None, [body], 1), [fd])
            os.close(fd)

    got: list[list[RawFrame]] = [[], []]
    threads = [threading.Thread(target=send, args=(end, bodies)) for end, bodies in zip(ends, sent, strict=True)]
    threads += [threading.Thread(target=collect, args=(e.user, num, g)) for e, g in zip(ends, got, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for bodies, received in zip(reversed(sent), got, strict=True):
        assert [bytes(raw.parsed().rest) for raw in received] == bodies
        assert [zlib.crc32(content_of(raw.fds[0])) for raw in received] == [zlib.crc32(file) for file in files]
        for raw in received:
            os.close(raw.fds[0])


def test_who_does_not_read_stops_the_sender_and_loses_nothing(ends: tuple[End, End]) -> None:
    sender, reader = ends
    body = os.urandom(1 << 20)
    num = 40
    sent = []

    def send() -> None:
        for _ in range(num):
            send_all(sender.user, pack(frames.LOG, rest=[body]))
            sent.append(1)

    thread = threading.Thread(target=send)
    thread.start()
    deadline = time.monotonic() + 60
    while len(sent) < 15 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)  # it would go on
    assert 15 <= len(sent) <= 20  # the window, and what fits into sockets
    send_all(reader.user, pack(frames.LOG, rest=[b"small"]))  # the other way is open
    other: list[RawFrame] = []
    collect(sender.user, 1, other)
    assert bytes(other[0].parsed().rest) == b"small"
    got: list[RawFrame] = []
    collect(reader.user, num, got)
    thread.join()
    assert all(raw.parsed().rest == body for raw in got)
    assert len(got) == num


def test_the_end_comes_after_everything(ends: tuple[End, End]) -> None:
    first, second = ends
    for number in range(50):
        send_all(first.user, pack(frames.LOG, number, rest=[b"z" * 100_000]))
        if number == 20:
            time.sleep(0.05)
    first.user.close()
    got: list[RawFrame] = []
    collect(second.user, 51, got)  # ends at the end of the stream
    assert [raw.rank for raw in got] == list(range(50))
    assert second.told == ["through"]


def test_garbage_ends_the_link_and_nothing_else(ends: tuple[End, End]) -> None:
    first, second = ends
    assert first.link is not None
    os.write(first.link.write_fd, b"garbage" * 10)
    deadline = time.monotonic() + 60
    while not second.lost and time.monotonic() < deadline:
        time.sleep(0.01)
    assert second.lost == ["bytes that are not a record came over the link"]
    send_all(second.user, pack(frames.LOG))  # its local side goes on
