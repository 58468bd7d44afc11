"""A job's log: whole lines with prefixes, no secrets, progress bars thinned, and readers that miss nothing."""

from __future__ import annotations

import functools
import os
import random
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.tasks import api, record, sdk, supervisor
from atoll.tasks.control import LocalControl
from atoll.tasks.logs import Follower, JobLog, LogFile, Prefixer, only_rank, tail_start
from atoll.tasks.spec import JobSpec, JobStatus
from atoll.tasks.store import Store
from atoll.tasks.transitions import SetStatus


def lines_of(prefixer: Prefixer, *chunks: bytes, now: float = 100.0) -> bytes:
    return b"".join([prefixer.feed(chunk, now) for chunk in chunks]) + prefixer.flush()


# ------------------------------------------------------------------------------------------------- lines
@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([b"a\nb\n"], b"> a\n> b\n"),
        ([b"a", b"b\nc"], b"> ab\n> c\n"),
        ([b"\n\nx\n"], b"> \n> \n> x\n"),
        ([b"a\r\nb\r\n"], b"> a\n> b\n"),
        ([b"a\r", b"\nb\r\n"], b"> a\n> b\n"),
        ([b"1%\r2%\r100%\ndone\n"], b"> 100%\n> done\n"),
        ([b"plain\n1%\r2%\r\nplain\n"], b"> plain\n> 2%\n> plain\n"),
        ([b"no end"], b"> no end\n"),
        ([], b""),
        ([b"\xff\x00\n"], b"> \xff\x00\n"),
    ],
)
def test_lines(chunks: list[bytes], expected: bytes) -> None:
    assert lines_of(Prefixer(b"> "), *chunks) == expected


def test_any_cut_gives_the_same_lines() -> None:
    text = b"".join(b"line %d %s\n" % (i, b"x" * (i % 90)) for i in range(2000))
    whole = lines_of(Prefixer(b"(p) "), text)
    assert whole == b"".join(b"(p) " + line + b"\n" for line in text.splitlines())
    for seed in range(20):
        rng = random.Random(seed)
        cuts = sorted(rng.randrange(len(text)) for _ in range(50))
        chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert lines_of(Prefixer(b"(p) "), *chunks) == whole


@pytest.mark.parametrize("form", [b"\r%d%%", b"%d%%\r"])
def test_a_progress_bar_shows_two_states_a_second(form: bytes) -> None:
    prefixer = Prefixer(b"> ")
    shown = [prefixer.feed(form % i, 100.0 + i / 100) for i in range(100)]  # one second of it
    shown.append(prefixer.feed(b"\nnext\n", 101.0))
    text = b"".join(shown)
    assert text.endswith(b"> next\n")
    assert 3 <= text.count(b"\n") <= 6
    assert b"> 99%\n" in text


def test_a_bar_that_stands_still_is_shown_by_a_tick() -> None:
    prefixer = Prefixer(b"> ")
    assert prefixer.feed(b"1%\r", 100.0) == b"> 1%\n"
    assert prefixer.feed(b"2%\r", 100.1) == b""
    assert prefixer.bar_due == 100.5
    assert prefixer.tick(100.3) == b""
    assert prefixer.tick(100.5) == b"> 2%\n"
    assert prefixer.bar_due is None


def test_a_line_without_end_is_not_kept_for_ever() -> None:
    prefixer = Prefixer(b"> ")
    shown = b"".join(prefixer.feed(b"x" * 65536, 100.0) for _ in range(64)) + prefixer.flush()
    assert shown.count(b"x") == 64 * 65536
    assert 2 <= shown.count(b"\n") <= 5


# ------------------------------------------------------------------------------------------------- secrets
def test_secrets_are_hidden_wherever_a_chunk_ends(tmp_path: Path) -> None:
    secret = "hf_abcdef123"
    text = f"a {secret} b\n{secret}{secret}\nprefix{secret}".encode()
    for cut in range(len(text)):
        folder = tmp_path / str(cut)
        log = JobLog(folder, [secret, "short"])
        stream = log.stream("(t) ")
        stream.feed(text[:cut], 1.0)
        stream.feed(text[cut:], 1.0)
        log.end(stream, 1.0)
        log.say(f"we say {secret} and short")
        log.close(1.0)
        shown = (folder / "run.log").read_bytes()
        assert shown == b"(t) a **** b\n(t) ********\n(t) prefix****\nwe say **** and short\n"


@pytest.mark.parametrize("secrets", [[], ["a-secret-value"]])
def test_a_line_in_a_hundred_thousand_pieces_costs_as_much_as_there_are(tmp_path: Path, secrets: list[str]) -> None:
    def work(num: int) -> float:
        log = JobLog(tmp_path / str(num), secrets)
        stream = log.stream("(t) ")
        begun = time.thread_time()  # of ours alone, whatever else the machine is busy with
        for _ in range(num):
            stream.feed(b".", 1.0)
            assert stream.due == 1.5
        took = time.thread_time() - begun
        log.close(1.0)
        assert (tmp_path / str(num) / "run.log").read_bytes() == b"(t) " + b"." * num + b"\n"
        return took

    few, many = work(50_000), work(400_000)
    assert many < 8 * 2.5 * few


def test_each_line_of_a_secret_is_hidden(tmp_path: Path) -> None:
    log = JobLog(tmp_path, ["-----BEGIN-----\nMIIabcdef\n-----END-----"])
    log.say("the key has MIIabcdef in it")
    assert log.redactor.hide_text("x MIIabcdef") == "x ****"
    log.close(1.0)
    assert (tmp_path / "run.log").read_bytes() == b"the key has **** in it\n"


def test_a_secret_with_a_byte_that_is_no_text(tmp_path: Path) -> None:
    log = JobLog(tmp_path, [os.fsdecode(b"caf\xe9-secret")])
    stream = log.stream("")
    stream.feed(b"it is caf\xe9-secret\n", 1.0)
    log.say(os.fsdecode(b"we say caf\xe9-secret, caf\xe9 and ") + "\ud83d")
    assert log.redactor.hide_text("lines decoded: caf\ufffd-secret") == "lines decoded: ****"
    assert log.redactor.hide_text(os.fsdecode(b"caf\xe9-secret, \xe9")) == "****, \ufffd"
    log.close(1.0)
    said = (tmp_path / "run.log").read_bytes()
    assert said.startswith(b"it is ****\n")
    assert b"secret" not in said


def test_a_secret_in_a_line_without_end(tmp_path: Path) -> None:
    secret = "s3cret-value"
    log = JobLog(tmp_path, [secret])
    stream = log.stream("")
    for _ in range(30):
        stream.feed(b"x" * 99_997 + secret.encode()[:5], 1.0)
        stream.feed(secret.encode()[5:], 1.0)
    log.close(1.0)
    data = (tmp_path / "run.log").read_bytes()
    assert secret.encode() not in data
    assert data.count(b"****") == 30


# ------------------------------------------------------------------------------------------------- files
def test_a_full_disk_costs_output_and_says_so(tmp_path: Path) -> None:
    """A limit on the size of files does what a full disk does: a part of a write succeeds, then it fails."""
    log = LogFile(tmp_path / "run.log")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        for i in range(200):
            log.write(b"line %03d\n" % i)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert log.problem is not None
    log.write(b"and on\n")
    log.write(b"and on\n")
    log.close()
    text = (tmp_path / "run.log").read_text()
    assert text.startswith("line 000\n")
    assert text.endswith("and on\nand on\n")
    assert text.count("bytes of output are missing here: File too large") == 1
    for line in text.splitlines()[:100]:
        assert len(line) == 8


def test_a_folder_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    log = LogFile(tmp_path / "file" / "run.log")
    log.write(b"x\n")
    log.close()
    assert log.problem == "File exists"


# ------------------------------------------------------------------------------------------------- reading
def last(path: Path, num_lines: int, only: re.Pattern[bytes] | None = None) -> str:
    got: list[bytes] = []
    with Follower(path, got.append, only) as follower:
        before = follower.position_of_tail(num_lines)
    assert got == []
    with Follower(path, got.append, only) as follower:
        follower.skip(before, 0)
        follower.drain()
        assert not follower.step()
    return b"".join(got).decode()


@pytest.mark.parametrize("num", [1, 2, 5, 1000])
@pytest.mark.parametrize("end", ["\n", ""])
def test_tail(tmp_path: Path, num: int, end: str) -> None:
    lines = [f"line {i} {'x' * (i * 7 % 4000)}" for i in range(900)]
    path = tmp_path / "log"
    path.write_text("\n".join(lines) + end)
    assert last(path, num) == "\n".join(lines[-num:]) + end
    fd = os.open(os.devnull, os.O_RDONLY)
    assert tail_start(fd, 3) == 0
    os.close(fd)


def test_following_misses_nothing_and_ends(tmp_path: Path) -> None:
    path = tmp_path / "log"
    got: list[bytes] = []
    over = threading.Event()
    data = [os.urandom(random.Random(i).randrange(1, 200_000)) for i in range(60)]

    def write() -> None:
        log = LogFile(path)
        for each in data:
            log.write(each)
            time.sleep(0.001)
        log.close()
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    with Follower(path, got.append) as follower:
        while not over.is_set():
            follower.drain()
        follower.drain()
    writer.join()
    assert b"".join(got) == b"".join(data)


def test_a_log_that_is_read_once_has_all_that_led_to_the_status_given_with_it(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.add(JobSpec(run="true"), task_id_for=str, user="ada")
        store.apply(1, [SetStatus(JobStatus.RUNNING)], 1.0)
    log = LogFile(tmp_path / "jobs/1/run.log")
    log.write(b"begun\n")
    lock = supervisor.open_lock(tmp_path)
    assert record.take_lock(lock, 0.0)  # else its supervisor would be taken for dead

    def ends_meanwhile(_data: bytes) -> None:
        with Store(tmp_path) as store:
            store.apply(1, [SetStatus(JobStatus.SUCCEEDED)], 2.0)

    assert LocalControl(tmp_path).follow(1, ends_meanwhile, follow=False) is JobStatus.RUNNING
    assert LocalControl(tmp_path).follow(1, lambda data: None, follow=False) is JobStatus.SUCCEEDED
    log.close()
    os.close(lock)


def test_one_rank_of_several(tmp_path: Path) -> None:
    path = tmp_path / "log"
    rows = [f"(worker{i % 3 + 1}, rank={i % 3 + 1}, pid=7) (head, rank=1, pid=1) line {i}\n" for i in range(3000)]
    rows[10:10] = ["Waiting for task resources.\n", "(head, rank=12, pid=1) twelve\n"]
    path.write_text("".join(rows))
    got: list[bytes] = []
    with Follower(path, got.append, only_rank(1, several=True)) as follower:
        follower.drain()
    expected = [row for row in rows if row.startswith("(worker1, rank=1, ")]
    assert b"".join(got).decode() == "".join(expected)
    assert last(path, 4, only_rank(1, several=True)) == "".join(expected[-4:])


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_the_tail_of_a_long_log_is_read_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int | None
) -> None:
    rows = [f"(head, rank={i % 2}, pid=1) line {i} {'x' * 90}\n" for i in range(150_000)]
    rows[-30_000:-30_000] = [f"(head, rank=1, pid=1) {'y' * (3 << 20)}\n"]  # longer than what is read at a time
    path = tmp_path / "log"
    path.write_text("".join(rows))
    num_bytes = 0

    def counted(function: Callable[..., bytes], *arguments: Any) -> bytes:
        nonlocal num_bytes
        data = function(*arguments)
        num_bytes += len(data)
        return data

    for name in ("read", "pread"):
        monkeypatch.setattr(os, name, functools.partial(counted, getattr(os, name)))
    only = None if rank is None else only_rank(rank, several=True)
    ours = [row for row in rows if rank is None or f"rank={rank}," in row]
    assert last(path, 5, only) == "".join(ours[-5:])
    assert num_bytes <= 2 << 20
    assert last(path, 20_000, only) == "".join(ours[-20_000:])
    assert last(path, 10**9, only) == "".join(ours)


def test_what_is_left_out_counts_from_where_reading_begins(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"(head, rank={i % 2}, pid=1) {i}\n" for i in range(1000)))
    for only in (None, only_rank(1, several=True)):
        got: list[bytes] = []
        with Follower(path, got.append, only) as follower:
            follower.skip(follower.position_of_tail(10), 25)
            follower.drain()
        assert b"".join(got).decode() == last(path, 10, only)[25:]


def test_short_lines_of_a_long_secret_are_hidden(tmp_path: Path) -> None:
    log = JobLog(tmp_path, ["-----BEGIN-----\nabcd\nxyz\n", "12345"])
    log.say("abcd xyz -----BEGIN----- 12345")
    log.close(1.0)
    assert (tmp_path / "run.log").read_text() == "**** xyz **** 12345\n"


def test_tail_logs_does_not_cut_a_character(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Logged:
        def follow(self, write: Callable[[bytes], None], **how: object) -> JobStatus:
            for byte in "größer 🙂\n".encode():
                write(bytes([byte]))
            return JobStatus.SUCCEEDED

    monkeypatch.setattr(api, "job", lambda name, job_id: Logged())
    assert sdk.tail_logs("c") == 0
    assert capsys.readouterr().out == "größer 🙂\n"
