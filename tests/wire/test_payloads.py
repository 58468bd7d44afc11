"""Memory files: what goes in comes out writable, files are used again only when nobody maps them, none leaks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.wire import payloads
from atoll.wire.codec import Payload, dumps, loads
from atoll.wire.payloads import Arena, Encoded, decode_parts

BIG = 5 << 20  # more than is read instead of mapped


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena()
    yield arena
    arena.close()


def received(encoded: Encoded) -> tuple[memoryview, list[memoryview], object]:
    """As the other side gets it: inline bytes as one read-only block, the descriptor as a copy."""
    rest = memoryview(b"".join(bytes(part) for part in encoded.inline))
    fds = [os.dup(encoded.segment.fd)] if encoded.segment else []
    return decode_parts(encoded.table, rest, fds)


def payload(head: bytes, parts: list[memoryview]) -> Payload:
    return Payload([head], parts, [])


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@given(st.binary(max_size=50), st.lists(st.binary(max_size=200), max_size=4), st.booleans())
def test_what_goes_in_comes_out(head: bytes, buffers: list[bytes], large: bool) -> None:
    arena = Arena()
    parts = [memoryview(buffer) for buffer in buffers]
    if large:
        parts.append(memoryview(bytes(BIG)))
    encoded = arena.encode(payload(head, parts))
    assert (encoded.segment is not None) == large
    got_head, got, _ = received(encoded)
    assert bytes(got_head) == head
    assert [bytes(part) for part in got] == [bytes(part) for part in parts]
    assert all(not part.readonly for part in got)
    if encoded.segment:
        arena.give_back(encoded.segment)
    arena.close()


def test_writes_of_the_receiver_stay_its_own(arena: Arena) -> None:
    encoded = arena.encode(payload(b"h", [memoryview(bytes(BIG))]))
    _, (first,), _ = received(encoded)
    first[:4] = b"mine"
    _, (second,), _ = received(encoded)
    assert bytes(second[:4]) == bytes(4)
    assert encoded.segment is not None
    arena.give_back(encoded.segment)


def test_an_array_survives_its_file(arena: Arena) -> None:
    np = pytest.importorskip("numpy")
    encoded = arena.encode(dumps(np.arange(BIG), what="an array"))
    head, buffers, alive = received(encoded)
    array = loads(head, buffers)
    del head, buffers
    assert encoded.segment is not None
    encoded.segment.close()
    assert alive() is not None  # type: ignore[operator]
    array += 1
    assert array.sum() == BIG * (BIG + 1) // 2
    del array
    assert alive() is None  # type: ignore[operator]


def test_a_file_that_is_still_mapped_shows_so(arena: Arena) -> None:
    encoded = arena.encode(payload(b"h", [memoryview(bytes(BIG))]))
    head, buffers, alive = received(encoded)
    part = buffers[0][10:20]
    del head, buffers
    assert alive() is not None  # type: ignore[operator]
    part.release()
    assert encoded.segment is not None
    arena.give_back(encoded.segment)


def test_a_file_given_back_is_used_again(arena: Arena) -> None:
    first = arena.encode(payload(b"", [memoryview(bytes(BIG))])).segment
    assert first is not None
    number = first.fd
    arena.give_back(first)
    second = arena.encode(payload(b"", [memoryview(bytes(BIG))])).segment
    assert second is not None
    assert second.fd == number
    third = arena.encode(payload(b"", [memoryview(bytes(BIG))])).segment
    assert third is not None
    assert third.fd != number  # that one is in use
    arena.give_back(second)
    arena.give_back(third)


def test_a_small_payload_takes_no_huge_file(arena: Arena) -> None:
    huge = arena.encode(payload(b"", [memoryview(bytes(64 << 20))])).segment
    assert huge is not None
    arena.give_back(huge)
    small = arena.encode(payload(b"", [memoryview(bytes(BIG))])).segment
    assert small is not None
    assert small.capacity < 8 << 20
    arena.give_back(small)


def test_files_do_not_pile_up(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "_KEEP_BYTES", 4 * BIG)
    before = open_files()
    taken = [arena.encode(payload(b"", [memoryview(bytes(BIG))])).segment for _ in range(10)]
    assert open_files() == before + 10
    for segment in taken:
        assert segment is not None
        arena.give_back(segment)
    assert open_files() <= before + 4
    arena.trim(older_than_s=-1.0)
    assert open_files() == before


def test_nothing_leaks_where_copying_fails(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, part: memoryview, offset: int) -> None:
        raise OSError(28, "No space left on device")

    before = open_files()
    monkeypatch.setattr(payloads, "_write", full)
    with pytest.raises(OSError, match="No space"):
        arena.encode(payload(b"", [memoryview(bytes(BIG))]))
    assert open_files() == before


def test_nothing_leaks_where_mapping_fails() -> None:
    fd = os.memfd_create("test")  # empty: shorter than its table says
    before = open_files()
    with pytest.raises((OSError, ValueError)):
        decode_parts({"head": 10, "buffers": [BIG], "file": 1}, memoryview(b""), [fd])
    assert open_files() == before - 1


def test_threads_never_share_a_file(arena: Arena) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        data = bytes([number]) * BIG
        for _ in range(30):
            encoded = arena.encode(payload(b"", [memoryview(data)]))
            _, (got,), _ = received(encoded)
            if bytes(got) != data:
                wrong.append(number)
            got.release()
            assert encoded.segment is not None
            arena.give_back(encoded.segment)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_file_not_worth_a_mapping_is_read(arena: Arena) -> None:
    encoded = arena.encode(payload(b"head", [memoryview(bytes(range(256)) * 4096)]))
    assert encoded.segment is not None
    before = open_files()
    head, (part,), alive = received(encoded)
    assert open_files() == before, "a mapping would hold a descriptor"
    assert alive is None
    assert bytes(head) == b"head"
    assert bytes(part) == bytes(range(256)) * 4096
    part[0] = 7  # writable
    arena.give_back(encoded.segment)


def test_large_bytes_are_not_copied_into_a_head_first(arena: Arena) -> None:
    data = os.urandom(1 << 20)
    made = dumps((data, {"more": bytearray(data)}))
    assert any(chunk is data for chunk in made.chunks)
    encoded = arena.encode(made)
    head, buffers, _ = received(encoded)
    assert loads(head, buffers) == (data, {"more": bytearray(data)})
    assert bytes(head) == made.head
    assert encoded.segment is not None
    arena.give_back(encoded.segment)
